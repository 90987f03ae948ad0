from __future__ import annotations

from collections.abc import Iterator

import pytest

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.allocators import Pool
from onebudget.device.base import Device
from onebudget.device.wrappers import FaultPool, LeaksPool, LimitPool, PoolCounts, StatisticsPool, TracePool
from onebudget.errors import AllocationError, ConfigError, UseAfterFreeError
from onebudget.units import KIB, MIB


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("fake", capacity_bytes=8 * MIB) as device:
        yield device


@pytest.fixture
def pool(device: Device) -> Pool:
    pool = device.primary_pool()
    assert pool is not None
    return pool


def manager_of(device: Device, pool: Pool) -> BufferManager:
    return BufferManager(device.create_stream(), pool=pool)


def test_limit_fills_to_the_byte(device: Device, pool: Pool) -> None:
    limited = LimitPool(pool, 1 * MIB)
    manager = manager_of(device, limited)
    with manager.gpu(1 * MIB - 512):
        last = manager.gpu(1)
        with pytest.raises(AllocationError) as failure:
            manager.gpu(1)
        assert (failure.value.requested_bytes, failure.value.free_bytes) == (1, 0)
        last.release()
        with manager.gpu(512):
            assert limited.held_bytes == 1 * MIB
    assert limited.held_bytes == 0
    with pytest.raises(ConfigError):
        LimitPool(pool, -1)


def test_limit_takes_nothing_when_the_pool_below_fails(device: Device, pool: Pool) -> None:
    limited = LimitPool(pool, 100 * MIB)
    with pytest.raises(AllocationError):
        manager_of(device, limited).gpu(50 * MIB)
    assert limited.held_bytes == 0


def test_statistics(device: Device, pool: Pool) -> None:
    counted = StatisticsPool(pool)
    manager = manager_of(device, counted)
    first, second = manager.gpu(1000), manager.gpu(2000)
    first.release()
    with pytest.raises(AllocationError):
        manager.gpu(50 * MIB)
    assert counted.counts() == PoolCounts(2048, 3072, 3072, 1, 2, 1)
    second.release()
    assert counted.counts() == PoolCounts(0, 3072, 3072, 0, 2, 1)


def test_trace_keeps_the_last_calls(device: Device, pool: Pool) -> None:
    traced = TracePool(pool, limit=4)
    manager = manager_of(device, traced)
    buffer = manager.gpu(1000, owner="x")
    address = buffer.data_ptr
    buffer.release()
    manager.pool_trim_to(4096)
    with pytest.raises(AllocationError):
        manager.gpu(50 * MIB)
    stream_id = manager.stream.stream_id
    seen = [(r.number, r.action, r.nbytes, r.owner, r.address, r.stream_id) for r in traced.records()]
    assert seen == [
        (0, "allocate", 1024, "x", address, stream_id),
        (1, "free", 1024, "x", address, stream_id),
        (2, "trim", 4096, "", 0, None),
        (3, "failed", 50 * MIB, "buffers", 0, stream_id),
    ]
    manager.pool_trim_to(0)
    assert [record.number for record in traced.records()] == [1, 2, 3, 4]


def test_leaks_name_owner_and_place(device: Device, pool: Pool) -> None:
    watched = LeaksPool(pool, frames=8)
    manager = manager_of(device, watched)
    with manager.gpu(3000, owner="big"), manager.gpu(100, owner="small"):
        leaks = watched.leaks()
        assert [(leak.owner, leak.nbytes) for leak in leaks] == [("big", 3072), ("small", 512)]
        assert any("test_leaks_name_owner_and_place" in place for place in leaks[0].made_at)
    assert watched.leaks() == []


def test_faults_choose_by_number_and_size(device: Device, pool: Pool) -> None:
    faulty = FaultPool(pool, lambda number, nbytes: number == 1 or nbytes > 1 * MIB)
    manager = manager_of(device, faulty)
    manager.gpu(10).release()
    for nbytes in (10, 2 * MIB):
        with pytest.raises(AllocationError, match="Injected"):
            manager.gpu(nbytes)
    manager.gpu(10).release()


def test_wrappers_stack_and_pass_on(device: Device, pool: Pool) -> None:
    stack = TracePool(StatisticsPool(LimitPool(pool, 64 * KIB)))
    manager = manager_of(device, stack)
    with manager.gpu(64 * KIB) as buffer:
        assert manager.pool_stats() == pool.stats() == stack.stats()
        assert (stack.reserved_bytes(), stack.used_bytes(), stack.free_bytes()) == (64 * KIB, 64 * KIB, 0)
        with pytest.raises(AllocationError):
            manager.gpu(1)
        allocation = buffer._allocation
        assert allocation is not None
    with pytest.raises(UseAfterFreeError, match="double free"):
        stack.deallocate(allocation, manager.stream)
    manager.pool_trim_to(0)
    assert pool.stats().reserved == 0
    assert [record.action for record in stack.records()] == ["allocate", "failed", "free", "trim"]
