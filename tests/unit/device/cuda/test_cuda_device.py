"""Readings, blocking and host memory, copies and fills, closing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from onebudget.buffers import BufferManager
from onebudget.device.cuda import CudaDevice
from onebudget.device.cuda_torch import TorchAllocator
from onebudget.errors import AllocationError, DeviceError, StateError, UseAfterFreeError
from onebudget.units import KIB, MIB


class StandInTorch:
    """torch's allocator with 5 MiB live, 9 MiB at the peak, and 3 MiB that it would give back."""

    def __init__(self, api: Any) -> None:
        self.live, self.peak, self.idle = 5 * MIB, 9 * MIB, 3 * MIB
        self._api = api
        api.others_bytes += self.live + self.idle

    def live_bytes(self) -> int:
        return self.live

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.live

    def empty_cache(self) -> None:
        self._api.others_bytes -= self.idle
        self.idle = 0


@pytest.fixture
def torch_allocator(api: Any, device: CudaDevice) -> StandInTorch:
    stand_in = StandInTorch(api)
    device.torch = stand_in  # type: ignore[assignment]
    return stand_in


def test_free_and_used_are_the_drivers(api: Any, device: CudaDevice) -> None:
    assert (device.free_bytes(), device.used_bytes()) == (924 * MIB, 100 * MIB)
    api.others_bytes = 300 * MIB
    assert (device.free_bytes(), device.used_bytes()) == (724 * MIB, 300 * MIB)
    assert device.sample().free == 724 * MIB


def test_live_is_torchs_and_ours(manager: BufferManager, torch_allocator: StandInTorch) -> None:
    device = manager.device
    with manager.gpu(1000, owner="kv"), manager.gpu_sync(1 * MIB, owner="model"):
        sample = device.sample()
        assert sample.alloc_live == 5 * MIB + 1024 + 1 * MIB
        assert sample.alloc_peak == 9 * MIB + 1024 + 1 * MIB
        owners = device.used_by_owner()
        assert owners == {"kv": 1024, "model": 1 * MIB, "tensors": 5 * MIB}
        assert sum(owners.values()) == sample.alloc_live
    assert device.sample().alloc_peak == 10 * MIB + 1024
    device.reset_peak()
    assert device.sample().alloc_peak == 5 * MIB
    assert device.peak_by_owner() == {"tensors": 5 * MIB}


def test_torch_that_never_touched_cuda_holds_nothing() -> None:
    allocator = TorchAllocator(0)
    assert (allocator.live_bytes(), allocator.peak_bytes()) == (0, 0)
    allocator.reset_peak()
    allocator.empty_cache()


def test_charging_tensors_is_torchs_business(device: CudaDevice) -> None:
    device.charge_tensor_bytes(2**60)
    device.refund_tensor_bytes(2**60)
    assert device.sample().alloc_live == 0


@pytest.mark.parametrize(("call", "kind"), [("gpu_sync", "device"), ("managed", "managed"), ("pinned", "host")])
def test_each_blocking_kind_has_its_function(api: Any, manager: BufferManager, call: str, kind: str) -> None:
    with getattr(manager, call)(1000) as buffer:
        expected = 1000 if kind == "host" else 1024
        assert api.memory[buffer.data_ptr] == (kind, expected)
    assert api.memory == {}


def test_pageable_memory_is_not_the_drivers(api: Any, manager: BufferManager) -> None:
    with manager.cpu(1000) as buffer:
        manager.set_mem(buffer, 7)
        assert bytes(buffer.as_numpy()) == b"\x07" * 1000
        assert api.memory == {}


def test_page_locked_memory_is_filled_by_the_host(api: Any, device: CudaDevice) -> None:
    page = ctypes.create_string_buffer(64)
    address = ctypes.addressof(page)
    api.memory[address] = ("host", 64)
    device.fill(address, 9, 64, None)
    assert page.raw == b"\x09" * 64
    del api.memory[address]


@pytest.mark.parametrize("call", ["gpu_sync", "managed"])
def test_memory_that_does_not_fit_is_asked_for_twice(manager: BufferManager, call: str) -> None:
    device = manager.device
    manager.gpu(900 * MIB).release()  # idle in the pool
    with getattr(manager, call)(900 * MIB):
        assert device.free_bytes() == 24 * MIB
        with pytest.raises(AllocationError) as failure:
            getattr(manager, call)(30 * MIB, owner="last")
    error = failure.value
    assert (error.requested_bytes, error.free_bytes, error.owner) == (30 * MIB, 24 * MIB, "last")
    assert error.kind == ("managed" if call == "managed" else "gpu")
    assert device.account.blocking_bytes == 0
    assert device.used_by_owner() == {}


def test_torchs_idle_memory_makes_room(manager: BufferManager, torch_allocator: StandInTorch) -> None:
    with manager.gpu_sync(918 * MIB):
        assert torch_allocator.idle == 0


def test_page_locked_memory_that_cannot_be_had(api: Any, manager: BufferManager) -> None:
    api.failures["cuMemHostAlloc"] = [2, 2]
    with pytest.raises(AllocationError) as failure:
        manager.pinned(10 * KIB, owner="staging")
    assert (failure.value.kind, failure.value.owner, failure.value.requested_bytes) == ("pinned", "staging", 10 * KIB)
    assert failure.value.free_bytes == manager.device.host_free_bytes()
    assert manager.device.host_bytes == 0


def test_other_failures_pass_through(api: Any, manager: BufferManager) -> None:
    api.fail("cuMemAlloc", 700)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        manager.gpu_sync(10)
    assert manager.device.account.blocking_bytes == 0


def test_blocking_frees_wait_for_the_device(api: Any, manager: BufferManager) -> None:
    for call, free in (("gpu_sync", "cuMemFree"), ("managed", "cuMemFree"), ("pinned", "cuMemFreeHost")):
        getattr(manager, call)(10).release()
        names = [name for name, *_ in api.calls if "Current" not in name]
        assert names[-2:] == ["cuCtxSynchronize", free]


def test_copies_are_in_stream_order_or_at_once(api: Any, manager: BufferManager) -> None:
    stream = manager.stream
    with manager.pinned(64) as source, manager.gpu(64) as target, manager.pinned(64) as back:
        manager.copy(source, target)
        assert ("cuMemcpyAsync", target.data_ptr, source.data_ptr, 64, stream.handle) in api.calls  # type: ignore[attr-defined]
        manager.set_mem(target, 3)
        assert ("cuMemsetD8Async", target.data_ptr, 3, 64, stream.handle) in api.calls  # type: ignore[attr-defined]
        api.calls.clear()
        manager.copy(source, back)
        names = [name for name, *_ in api.calls if "Current" not in name]
        assert names == ["cuMemcpyAsync", "cuStreamSynchronize"]


def test_work_on_memory_that_was_freed_is_refused(manager: BufferManager) -> None:
    device = manager.device
    allocation = device.primary_pool().allocate(512, manager.stream, "test")  # type: ignore[union-attr]
    device.primary_pool().deallocate(allocation, manager.stream)  # type: ignore[union-attr]
    with pytest.raises(UseAfterFreeError):
        device.fill(allocation.address, 0, 512, manager.stream, (allocation,))


@pytest.mark.parametrize(("able", "message"), [(0, "has no multicast memory"), (1, "NVLS unsupported")])
def test_multicast_is_refused(api: Any, open_cuda: Any, able: int, message: str) -> None:
    api.abilities["MULTICAST_SUPPORTED"] = able
    manager = BufferManager(open_cuda().create_stream())
    with pytest.raises(DeviceError, match=message):
        manager.ipc_nvls({0}, 1000)
    assert manager.device.account.blocking_bytes == 0


def test_closing_gives_everything_back(api: Any, device: CudaDevice) -> None:
    manager = BufferManager(device.create_stream())
    buffers = [manager.gpu(10), manager.gpu_sync(10), manager.managed(10), manager.pinned(10), manager.pinned_pool(10)]
    handle = device.vmm.create(2 * MIB, owner="left")
    device.vmm.map(device.vmm.reserve(2 * MIB), handle)
    device.close()
    device.close()
    assert api.left() == {}
    for buffer in buffers:
        with pytest.raises(StateError):
            _ = buffer.data_ptr
        buffer.release()
    assert api.left() == {}


def test_closing_a_broken_device_tries_everything(api: Any, device: CudaDevice) -> None:
    manager = BufferManager(device.create_stream())
    kept = [manager.gpu_sync(10), manager.pinned(10)]
    api.failures["cuCtxSynchronize"] = [700] * 10
    api.failures["cuStreamSynchronize"] = [700] * 10
    api.fail("cuMemFreeHost", 700)
    with pytest.raises(DeviceError, match="cuMemFreeHost"):
        device.close()
    assert api.left() == {"host": 1}
    api.memory.clear()
    for buffer in kept:
        buffer.release()


def test_synchronize_raises_what_the_driver_says(api: Any, device: CudaDevice) -> None:
    api.fail("cuCtxSynchronize", 700)
    with pytest.raises(DeviceError, match="cuCtxSynchronize"):
        device.synchronize()
