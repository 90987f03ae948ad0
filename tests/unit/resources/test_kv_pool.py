from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import AllocationError
from onebudget.resources.kv.pool import KVLayout, KVPool

PAIR = ((2, 8), (2, 8))


def layout(dtype: str = "float32", parts: tuple[tuple[int, ...], ...] = PAIR) -> KVLayout:
    return KVLayout(num_layers=3, tokens_per_block=4, parts=parts, dtype=dtype)


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=2**20, poison=True) as device:
        yield device


def pool(device: Device, blocks: int = 5, **shape: object) -> KVPool:
    return KVPool(BufferManager(device.create_stream()), layout(**shape), blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "parts", "row_bytes"),
    [("float32", PAIR, 128), ("bfloat16", PAIR, 64), ("float16", ((40,),), 80), ("float8_e4m3fn", ((40,),), 40)],
)
def test_bytes(device: Device, dtype: str, parts: tuple[tuple[int, ...], ...], row_bytes: int) -> None:
    """A row is all parts of one token in one layer; a block four of them in each of three layers."""
    shape = layout(dtype, parts)
    assert (shape.row_bytes, shape.block_bytes) == (row_bytes, 12 * row_bytes)
    one = pool(device, 5, dtype=dtype, parts=parts)
    assert one.allocated_bytes == 5 * 12 * row_bytes
    assert device.used_by_owner() == {"kv_cache": -(-one.allocated_bytes // 512) * 512}


def test_views_of_all_layers_and_parts_cover_the_buffer_once(device: Device) -> None:
    one = pool(device)
    pages = [page for layer in one.parts for page in layer]
    assert [tuple(page.slots.shape) for page in pages] == [(20, 2, 8)] * 6
    assert [tuple(page.blocks.shape) for page in pages] == [(5, 64)] * 6
    for number, page in enumerate(pages):
        page.slots.fill_(number)
    for number, page in enumerate(pages):
        assert page.blocks.unique().tolist() == [number]
    assert one.buffer.as_tensor().sum().item() == sum(range(6)) * 5 * 64


def test_slots_and_blocks_are_two_views_of_the_same(device: Device) -> None:
    page = pool(device).parts[1][0]
    page.slots[2 * 4 + 3] = 7.0
    assert page.blocks[2].view(4, 2, 8)[3].unique().tolist() == [7.0]


def test_blocks_nobody_wrote_are_cleared(device: Device) -> None:
    one = pool(device)
    for layer in one.parts:
        for page in layer:
            page.slots.fill_(float("nan"))
    one.clear_fresh([1, 3])
    assert [bool(torch.isnan(one.parts[2][1].blocks[block]).any()) for block in range(5)] == [True, False] * 2 + [True]
    one.parts[0][0].blocks[1] = 5.0
    one.clear_fresh(range(1))
    assert one.parts[0][0].blocks[:2].unique().tolist() == [0.0, 5.0]


def test_the_card_is_filled_to_the_byte_and_one_block_more_fails() -> None:
    with open_device("host", capacity_bytes=16 * 4096) as device:
        blocks = 16 * 4096 // layout().block_bytes
        assert blocks * layout().block_bytes == 16 * 4096 - 1024
        pool(device, blocks).release()
        with pytest.raises(AllocationError) as full:
            pool(device, blocks + 1)
        assert full.value.owner == "kv_cache"
        assert device.sample().alloc_live == 0


def test_release_twice_and_allocate_again(device: Device) -> None:
    one = pool(device)
    one.release()
    one.release()
    assert device.sample().alloc_live == 0
    one.allocate()
    assert len(one.parts) == 3


def test_on_the_fake_device_it_costs_the_same_bytes() -> None:
    with open_device("fake", capacity_bytes=2**20) as device:
        one = pool(device)
        assert device.used_by_owner() == {"kv_cache": one.allocated_bytes}
        one.clear_fresh([0, 1])
        assert one.parts[0][0].slots.is_meta
