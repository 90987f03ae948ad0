"""Pools whose memory comes and goes behind addresses that stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from onebudget.buffers import BufferManager
from onebudget.buffers.virtual import materialize_with_tag, release_with_tag, virtual_memory_scope
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import AllocationError, ConfigError, DeviceError, StateError, UseAfterFreeError
from onebudget.resources.kv.elastic import ElasticPool, step_blocks, unit_blocks
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.moving import resize_pools
from onebudget.resources.kv.pool import KVLayout, KVPool

PAGE = 4096
LAYOUT = KVLayout(num_layers=2, tokens_per_block=4, parts=((2, 64), (2, 64)), dtype="float32")
"""One block of a part is 2 KiB, half a page; of all it is 8 KiB."""


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=64 * 8192, granularity_bytes=PAGE, poison=True) as device:
        yield device


def pool(device: Device, blocks: int = 10, *, most: int = 32, step: int = 4) -> ElasticPool:
    return ElasticPool(BufferManager(device.create_stream()), LAYOUT, blocks, most_blocks=most, step_blocks=step)


def test_pieces_fill_whole_pages_in_every_part() -> None:
    assert LAYOUT.block_bytes == 8192
    assert unit_blocks(LAYOUT, PAGE) == 2
    odd = KVLayout(num_layers=1, tokens_per_block=1, parts=((96,), (64,)), dtype="float32")
    assert unit_blocks(odd, PAGE) == 32  # 384 B: 32 blocks are three pages; 256 B: 16 blocks are one
    assert step_blocks(LAYOUT, PAGE, 64 * 8192) == 2
    assert step_blocks(LAYOUT, PAGE, 64 * 3 * 8192) == 4


def test_the_bytes_held_are_those_of_the_blocks(device: Device) -> None:
    one = pool(device)
    for blocks in (10, 6, 2, 14, 10, 32):
        one.resize(blocks) if blocks != one.num_blocks else None
        assert one.allocated_bytes == one.buffer.capacity_bytes == blocks * 8192
        assert device.used_bytes() == device.account.used_bytes == blocks * 8192
        assert device.used_by_owner() == {"kv_cache": blocks * 8192}
    one.release()
    one.release()
    assert (device.used_bytes(), device.vmm.counts().reservations) == (0, 0)


def test_blocks_that_stay_keep_contents_and_addresses(device: Device) -> None:
    one = pool(device)
    parts = [part for layer in one.parts for part in layer]
    for number, part in enumerate(parts):
        part.blocks[:10] = number
    addresses = [part.slots.data_ptr() for part in parts]
    one.resize(6)
    one.resize(14)
    assert [part.slots.data_ptr() for layer in one.parts for part in layer] == addresses
    for number, part in enumerate(parts):
        assert part.blocks[:6].unique().tolist() == [number]
    one.clear_fresh(range(6, 14))
    assert all(part.blocks[6:14].abs().max() == 0 for part in parts)


def test_blocks_that_move_take_their_contents_along(device: Device) -> None:
    one = pool(device)
    group = KVGroup(one)
    sequences = [group.open(number) for number in range(2)]
    sequences[0].table += group.blocks.take(5)
    sequences[1].table += group.blocks.take(4)
    for part in (part for layer in one.parts for part in layer):
        for block in sequences[1].table:
            part.blocks[block] = block
    group.close(0)
    assert sequences[1].table == [5, 6, 7, 8]
    group.resize(6)
    assert sequences[1].table[0] == 5 and max(sequences[1].table) == 5
    for part in (part for layer in one.parts for part in layer):
        assert [part.blocks[block].unique().item() for block in sequences[1].table] == [5, 6, 7, 8]
    assert device.used_bytes() == 6 * 8192


def test_two_pools_never_take_more_than_both_had(device: Device) -> None:
    first, second = pool(device, 32, most=64), pool(device, 32, most=64)
    assert device.free_bytes() == 0, "a step more at any moment would fail"
    groups = [KVGroup(first), KVGroup(second)]
    assert resize_pools(groups, [60, 4])
    assert resize_pools(groups, [8, 56])
    assert (first.num_blocks, second.num_blocks, device.used_bytes()) == (8, 56, 64 * 8192)


@pytest.mark.parametrize("operation", ["create", "map", "access"])
@pytest.mark.parametrize("skip", range(0, 8, 3))
def test_a_fault_while_growing_leaves_both_as_they_were(device: Device, operation: str, skip: int) -> None:
    """Growing from 32 to 40 blocks takes eight pieces: two in each of four parts."""
    first, second = pool(device, 32, most=64), pool(device, 32, most=64)
    groups = [KVGroup(first), KVGroup(second)]
    with device.faults.armed(operation, skip=skip):
        assert not resize_pools(groups, [40, 24])
    assert (first.num_blocks, second.num_blocks, device.used_bytes()) == (32, 32, 64 * 8192)
    assert resize_pools(groups, [40, 24])
    first.release()
    second.release()
    assert device.used_bytes() == 0


def test_no_memory_for_the_first_blocks(device: Device) -> None:
    with pytest.raises(AllocationError):
        pool(device, 68, most=68)
    with device.faults.armed("map", skip=5), pytest.raises(DeviceError):
        pool(device)
    assert (device.used_bytes(), device.vmm.counts().reservations) == (0, 0)


def test_pieces_sleep_with_their_scope(device: Device) -> None:
    with virtual_memory_scope("cache"):
        one = pool(device)
    one.resize(14)
    assert release_with_tag("cache") == 4 * 4
    assert device.used_bytes() == 0
    with pytest.raises(StateError, match="asleep"):
        one.clear_fresh([0])
    assert materialize_with_tag("cache") == 4 * 4
    assert device.used_bytes() == one.buffer.capacity_bytes == 14 * 8192
    one.clear_fresh([13])
    one.resize(10)
    one.release()
    assert device.used_bytes() == 0
    with pytest.raises(UseAfterFreeError):
        one.buffer.check_use()


def test_a_plain_pool_keeps_its_size(device: Device) -> None:
    plain = KVPool(BufferManager(device.create_stream()), LAYOUT, 4)
    assert plain.step_blocks == 0
    with pytest.raises(StateError, match="keeps its 4 blocks"):
        plain.resize(5)


def test_pieces_are_whole_pages_on_a_device_with_virtual_memory() -> None:
    plain = open_device("host", capacity_bytes=2**20, vmm_supported=False)
    with plain, pytest.raises(DeviceError, match="no virtual memory"):
        BufferManager(plain.create_stream()).elastic(8192)
    with open_device("host", capacity_bytes=2**20, granularity_bytes=PAGE) as device:
        buffer = BufferManager(device.create_stream()).elastic(8192)
        with pytest.raises(ConfigError, match="4096"):
            buffer.map(0, 100)
        buffer.map(4096, 4096)
        buffer.map(4096, 4096)
        buffer.unmap(0)
        assert (buffer.capacity_bytes, device.used_bytes()) == (4096, 4096)
        del buffer
        device.collect()
        assert device.used_bytes() == 0
