"""The driver's pool: how it is made, what it reports, and what happens without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onebudget.buffers import BufferManager, MemoryKind, memory_counters
from onebudget.device.cuda import CudaDevice
from onebudget.device.cuda_pool import CudaPool
from onebudget.errors import AllocationError, ConfigError
from onebudget.units import MIB


def stats_mib(manager: BufferManager) -> tuple[int, int, int]:
    stats = manager.pool_stats()
    return stats.reserved // MIB, stats.used // MIB, stats.free // MIB


def test_the_pool_is_its_own_and_keeps_everything(api: Any, manager: BufferManager) -> None:
    [pool] = api.pools.values()
    assert pool.attributes == {"CU_MEMPOOL_ATTR_RELEASE_THRESHOLD": 2**64 - 1}
    assert "ALLOCATION_TYPE_PINNED" in str(pool.props.allocType)
    assert "HANDLE_TYPE_NONE" in str(pool.props.handleTypes)
    assert "LOCATION_TYPE_DEVICE" in str(pool.props.location.type)
    assert int(pool.props.location.id) == 0
    assert "cuDeviceGetDefaultMemPool" not in api.names()


def test_allocation_and_free_go_to_the_managers_stream(api: Any, manager: BufferManager) -> None:
    handle = manager.stream.handle  # type: ignore[attr-defined]
    [pool] = api.pools
    buffer = manager.gpu(1000)
    address = buffer.data_ptr
    buffer.release()
    assert [call for call in api.calls if call[0].endswith("Async")] == [
        ("cuMemAllocFromPoolAsync", 1024, pool, handle),
        ("cuMemFreeAsync", address, handle),
    ]


def test_used_counts_until_the_stream_passes_the_free(api: Any, manager: BufferManager) -> None:
    manager.gpu(6 * MIB).release()
    api.calls.clear()
    assert stats_mib(manager) == (6, 6, 0)
    assert not any("Synchronize" in name for name, *_ in api.calls)
    assert manager.device.sample().alloc_live == 0
    assert manager.pool_stats(sync=True).used == 0
    assert stats_mib(manager) == (6, 0, 6)
    with manager.gpu(3 * MIB):
        manager.pool_trim_to(0)
        assert stats_mib(manager) == (4, 3, 1)
    manager.stream.synchronize()
    manager.pool_trim_to(2 * MIB)
    assert stats_mib(manager) == (2, 0, 2)
    with pytest.raises(ConfigError):
        manager.pool_trim_to(-1)


def test_a_full_device_waits_for_frees_and_trims_before_it_fails(api: Any, manager: BufferManager) -> None:
    manager.gpu(900 * MIB).release()
    with manager.gpu(920 * MIB), pytest.raises(AllocationError) as failure:
        manager.gpu(10 * MIB, owner="one more")
    error = failure.value
    assert (error.requested_bytes, error.free_bytes, error.owner, error.kind) == (10 * MIB, 4 * MIB, "one more", "gpu")
    assert "Imaginary 1000" in str(error)
    assert manager.device.used_by_owner() == {}


def test_no_pool_support_means_blocking_memory(api: Any, open_cuda: Callable[[], CudaDevice]) -> None:
    api.abilities["MEMORY_POOLS_SUPPORTED"] = 0
    manager = BufferManager(open_cuda().create_stream())
    assert manager.device.primary_pool() is None
    with manager.gpu(1 * MIB) as buffer:
        assert api.memory[buffer.data_ptr] == ("device", 1 * MIB)
    assert "cuMemPoolCreate" not in api.names()
    assert manager.pool_stats().reserved == 0
    manager.pool_trim_to(0)


@pytest.mark.parametrize("name", ["cuMemPoolCreate", "cuMemPoolSetAttribute"])
def test_a_pool_that_cannot_be_made_is_tried_once(api: Any, open_cuda: Callable[[], CudaDevice], name: str) -> None:
    api.fail(name, 700)
    device = open_cuda()
    assert device.primary_pool() is None
    assert device.primary_pool() is None
    assert api.names().count("cuMemPoolCreate") == 1
    assert api.pools == {}
    with BufferManager(device.create_stream()).gpu(512) as buffer:
        assert api.memory[buffer.data_ptr] == ("device", 512)


def test_a_free_after_the_stream_is_gone(api: Any, device: CudaDevice) -> None:
    manager = BufferManager(device.create_stream())
    buffer = manager.gpu(512)
    manager.stream.close()
    buffer.release()
    assert api.calls[-2][0] == "cuMemFreeAsync"  # then the context before it comes back
    assert api.calls[-2][2] == 0
    device.synchronize()
    assert api.memory == {}


def test_an_allocation_that_outlives_the_pool(api: Any, device: CudaDevice) -> None:
    stream = device.create_stream()
    pool = device.primary_pool()
    assert isinstance(pool, CudaPool)
    allocation = pool.allocate(512, stream, "late")
    device.close()
    assert api.left() == {}
    pool.deallocate(allocation, stream)
    assert api.left() == {}


def test_buffers_from_the_pool_are_counted_by_kind(device: CudaDevice) -> None:
    before = memory_counters.current(MemoryKind.GPU)
    manager = BufferManager(device.create_stream())
    first, second = manager.gpu(1000), manager.gpu(10)
    assert (memory_counters.current(MemoryKind.GPU) - before, memory_counters.delta(MemoryKind.GPU)) == (1010, 10)
    first.release()
    assert (memory_counters.current(MemoryKind.GPU) - before, memory_counters.delta(MemoryKind.GPU)) == (10, -1000)
    device.close()
    assert memory_counters.current(MemoryKind.GPU) == before
    second.release()
    assert memory_counters.current(MemoryKind.GPU) == before
