"""Real copies between the pool, host memory and files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.errors import AllocationError
from onebudget.resources.kv.disk_tier import DiskTier
from onebudget.resources.kv.host_tier import HostTier
from onebudget.resources.kv.pool import KVLayout, KVPool
from onebudget.resources.kv.tier import BlockTier


@pytest.fixture
def manager() -> Iterator[BufferManager]:
    with open_device("host", capacity_bytes=4 * 2**20) as device, BufferManager(device.create_stream()) as manager:
        yield manager


PAIRS: tuple[tuple[int, ...], ...] = ((2, 4), (2, 4))


def pool(manager: BufferManager, dtype: str = "float32", parts: tuple[tuple[int, ...], ...] = PAIRS) -> KVPool:
    one = KVPool(manager, KVLayout(3, 4, parts, dtype), 6)
    numbers = torch.Generator().manual_seed(0)
    content = torch.randint(0, 256, one.buffer.as_tensor().view(torch.uint8).shape, generator=numbers)
    one.buffer.as_tensor().view(torch.uint8).copy_(content)
    return one


def bytes_of(one: KVPool, block: int) -> bytes:
    return b"".join(part.blocks[block].view(torch.uint8).numpy().tobytes() for layer in one.parts for part in layer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("parts", [PAIRS, ((5,), (3,))], ids=["pairs", "latent"])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_comes_back_is_bit_equal(
    manager: BufferManager, tmp_path: Path, kind: str, dtype: str, parts: tuple[tuple[int, ...], ...]
) -> None:
    one = pool(manager, dtype, parts)
    tier: BlockTier = (
        HostTier(manager, 3, one.block_bytes) if kind == "host" else DiskTier(tmp_path, 3, one.block_bytes)
    )
    first, second = bytes_of(one, 4), bytes_of(one, 1)
    others = [bytes_of(one, block) for block in (2, 3, 5)]
    assert one.offload([4, 1], tier, [2, 0])
    one.clear_fresh([4, 1])
    assert one.onboard(tier, [0, 2], [4, 0]) == 2
    assert (bytes_of(one, 4), bytes_of(one, 0)) == (second, first)
    assert [bytes_of(one, block) for block in (2, 3, 5)] == others
    assert tier.read(2) == first
    tier.release()
    one.release()


def test_a_copied_block_is_equal_and_its_source_untouched(manager: BufferManager) -> None:
    one = pool(manager)
    before = [bytes_of(one, block) for block in range(6)]
    one.copy_block(3, 5)
    assert [bytes_of(one, block) for block in range(6)] == [*before[:5], before[3]]


def test_blocks_travel_from_host_memory_to_files_and_back(manager: BufferManager, tmp_path: Path) -> None:
    one = pool(manager)
    host, disk = HostTier(manager, 2, one.block_bytes), DiskTier(tmp_path, 2, one.block_bytes)
    wanted = bytes_of(one, 2)
    one.offload([2], host, [1])
    assert disk.write(0, host.read(1))
    host.write(1, bytes(one.block_bytes))
    assert one.onboard(disk, [0], [5]) == 1
    assert bytes_of(one, 5) == wanted
    host.write(0, disk.read(0) or b"")
    assert host.read(0) == wanted


def test_a_block_that_is_gone_ends_what_is_brought_back(manager: BufferManager, tmp_path: Path) -> None:
    one = pool(manager)
    tier = DiskTier(tmp_path, 3, one.block_bytes)
    one.offload([0, 1, 2], tier, [0, 1, 2])
    (tier.folder / "1.kv").unlink()
    assert one.onboard(tier, [0, 1, 2], [3, 4, 5]) == 1
    assert bytes_of(one, 3) == bytes_of(one, 0)


def test_memory_that_can_not_be_locked_is_used_as_it_is_with_one_warning(
    manager: BufferManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AllocationError(64, 0, kind="pinned")

    monkeypatch.setattr(manager, "pinned", refuse)
    one = pool(manager)
    with caplog.at_level(logging.WARNING):
        tier = HostTier(manager, 2, one.block_bytes)
    assert len(caplog.records) == 1
    assert "not page-locked" in caplog.text
    assert not tier.pinned
    wanted = bytes_of(one, 0)
    one.offload([0], tier, [1])
    assert tier.read(1) == wanted


def test_the_tier_is_not_charged_to_the_card(manager: BufferManager) -> None:
    used = manager.device.used_bytes()
    tier = HostTier(manager, 100, 2**16)
    assert manager.device.used_bytes() == used
    tier.release()
