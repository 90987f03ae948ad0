from __future__ import annotations

from collections.abc import Iterator

import pytest

from onebudget.buffers.pinned_pool import PinnedPool
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.device.sample import PoolStats
from onebudget.errors import AllocationError, UseAfterFreeError


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("fake", capacity_bytes=1 << 20, host_capacity_bytes=5 * 4096) as device:
        yield device


def test_freed_pages_are_reused_and_trimmed(device: Device) -> None:
    pool = PinnedPool(device)
    first = pool.allocate(5000, None, "x")
    assert pool.stats() == PoolStats(8192, 8192, 0)
    pool.deallocate(first, None)
    again = pool.allocate(4097, None, "y")
    assert (again.address, pool.stats()) == (first.address, PoolStats(8192, 8192, 0))
    pool.deallocate(again, None)
    pool.trim()
    assert (pool.stats(), device.host_bytes) == (PoolStats(0, 0, 0), 0)
    with pytest.raises(UseAfterFreeError):
        pool.deallocate(again, None)


def test_idle_pages_make_room_before_a_request_fails(device: Device) -> None:
    pool = PinnedPool(device)
    pool.deallocate(pool.allocate(4 * 4096, None, "x"), None)
    whole = pool.allocate(5 * 4096, None, "y")
    with pytest.raises(AllocationError):
        pool.allocate(1, None, "z")
    assert pool.stats() == PoolStats(5 * 4096, 5 * 4096, 0)
    pool.deallocate(whole, None)
    pool.close()
    assert device.host_bytes == 0
