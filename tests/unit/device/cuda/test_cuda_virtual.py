"""Virtual memory on the driver: order of calls, and nothing left when one of them fails."""

from __future__ import annotations

from typing import Any

import pytest

from onebudget.buffers import (
    BufferManager,
    materialize_with_tag,
    release_with_tag,
    virtual_memory_manager,
    virtual_memory_scope,
)
from onebudget.device.cuda import CudaDevice
from onebudget.device.vmm import VirtualCounts
from onebudget.errors import AllocationError, DeviceError, StateError
from onebudget.units import MIB

UP = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]


def test_memory_comes_up_in_order_and_goes_in_reverse(api: Any, manager: BufferManager) -> None:
    api.calls.clear()
    with virtual_memory_scope("kv"):
        buffer = manager.gpu(5_000_000)
    assert api.names() == UP
    assert api.mappings == {buffer.data_ptr: (next(iter(api.handles)), True)}
    assert list(api.handles.values()) == [6_291_456]
    assert manager.device.used_by_owner() == {"buffers": 5_000_192}
    buffer.release()
    assert api.names() == [*UP, "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


def test_memory_is_unmapped_only_when_the_device_is_idle(api: Any, manager: BufferManager) -> None:
    with virtual_memory_scope("kv"):
        buffer = manager.gpu(1 * MIB)
    manager.gpu(512).release()
    api.calls.clear()
    buffer.release()
    names = [name for name, *_ in api.calls if "Current" not in name]
    assert names[:2] == ["cuCtxSynchronize", "cuMemUnmap"]
    assert not any(api.streams.values())


@pytest.mark.parametrize("mode", ["none", "memset", "cpu", "pinned", "cpu_on_demand", "pinned_on_demand"])
def test_sleep_and_wake_keep_the_address(api: Any, manager: BufferManager, mode: str) -> None:
    with virtual_memory_scope("model", mode):
        buffer = manager.gpu(5_000_000)
    address, free = buffer.data_ptr, manager.device.free_bytes()
    for _ in range(2):
        assert release_with_tag("model") == 1
        assert manager.device.free_bytes() == free + 6_291_456
        with pytest.raises(StateError, match="asleep"):
            buffer.as_tensor()
        assert materialize_with_tag("model") == 1
        assert (buffer.data_ptr, manager.device.free_bytes()) == (address, free)
    assert len(api.reservations) == 1
    buffer.release()
    assert manager.device.host_bytes == 0


@pytest.mark.parametrize("mode", ["none", "cpu"])
@pytest.mark.parametrize("name", UP)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_failing_to_allocate_leaves_nothing(api: Any, manager: BufferManager, mode: str, name: str, index: int) -> None:
    api.fail(name, 700, skip=index)
    made = []
    with virtual_memory_scope("kv", mode), pytest.raises(DeviceError, match=f"ILLEGAL_ADDRESS.*{name}"):
        made.extend(manager.gpu(5_000_000) for _ in range(3))
    made.clear()
    manager.device.collect()
    assert manager.device.vmm.counts() == VirtualCounts(0, 0, 0, 0)
    assert (api.reservations, api.handles, api.mappings) == ({}, {}, {})


@pytest.mark.parametrize("name", UP[1:])
def test_failing_to_wake_rolls_back(api: Any, manager: BufferManager, name: str) -> None:
    with virtual_memory_scope("kv"):
        buffers = [manager.gpu(5_000_000) for _ in range(3)]
    lost = buffers[1].data_ptr
    release_with_tag("kv")
    api.fail(name, 700, skip=1)
    with pytest.raises(DeviceError, match=name):
        materialize_with_tag("kv")
    assert (api.handles, api.mappings) == ({}, {})
    assert virtual_memory_manager().take_bad_handles() == [lost]
    assert materialize_with_tag("kv") == 2
    for buffer in buffers:
        buffer.release()


def test_out_of_memory_reclaims_first_and_names_the_tag(manager: BufferManager) -> None:
    manager.gpu(900 * MIB).release()
    with virtual_memory_scope("kv"):
        with manager.gpu(900 * MIB), pytest.raises(AllocationError) as failure:
            manager.gpu(30 * MIB, owner="kv pool")
        error = failure.value
        assert (error.requested_bytes, error.free_bytes) == (30 * MIB, 24 * MIB)
        assert (error.tag, error.owner) == ("kv", "kv pool")
    assert manager.device.account.mapped_bytes == 0


def test_without_virtual_memory_it_is_refused(api: Any, open_cuda: Any) -> None:
    api.abilities["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"] = 0
    device: CudaDevice = open_cuda()
    with virtual_memory_scope("kv"), pytest.raises(DeviceError, match="no virtual memory management"):
        BufferManager(device.create_stream()).gpu(10)
