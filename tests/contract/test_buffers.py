"""Buffers: paths, kinds, views, sizes, copies, and everything that must be refused."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from onebudget.buffers import (
    BufferManager,
    MemoryKind,
    memory_counters,
    release_with_tag,
    virtual_memory_scope,
)
from onebudget.device.base import Device
from onebudget.device.streams import QueueEvent
from onebudget.device.tensors import lies_in_buffer
from onebudget.errors import AllocationError, ConfigError, StateError, UseAfterFreeError
from onebudget.units import MIB

HOST_KINDS = ("cpu", "pinned", "pinned_pool")


def path_of(device: Device) -> str:
    """Which of the three books the only buffer of a device is in."""
    account = device.account
    held = {"virtual": account.mapped_bytes, "pool": account.pool_bytes, "blocking": account.blocking_bytes}
    return ", ".join(name for name, nbytes in held.items() if nbytes)


@pytest.mark.parametrize(
    ("scope", "pool", "call", "path"),
    [
        ("on", "yes", "gpu", "virtual"),
        ("on", "yes", "gpu_sync", "virtual"),
        ("on", "no", "gpu", "virtual"),
        ("on", "no", "gpu_sync", "virtual"),
        ("off", "yes", "gpu", "pool"),
        ("off", "yes", "gpu_sync", "blocking"),
        ("off", "no", "gpu", "blocking"),
        ("off", "no", "gpu_sync", "blocking"),
    ],
)
def test_path_table(make_device: Any, scope: str, pool: str, call: str, path: str) -> None:
    device = make_device(pool_supported=pool == "yes")
    manager = BufferManager(device.create_stream())
    if scope == "on":
        with virtual_memory_scope("path"):
            buffer = getattr(manager, call)(1 * MIB)
    else:
        buffer = getattr(manager, call)(1 * MIB)
    assert path_of(device) == path
    buffer.release()  # outside the scope: through the allocator that made it
    manager.pool_trim_to(0)
    assert device.used_bytes() == 0


@pytest.mark.parametrize("kind", [*HOST_KINDS, "gpu", "gpu_sync", "managed"])
def test_each_kind_moves_its_counter_and_no_other(manager: BufferManager, kind: str) -> None:
    before = memory_counters.snapshot()
    buffer = getattr(manager, kind)(1000, "float32")
    expected = MemoryKind.parse(kind.removesuffix("_sync"))
    moved = {k: v - before[k] for k, v in memory_counters.snapshot().items() if v != before[k]}
    assert moved == {expected: 4000}
    assert memory_counters.delta(expected) == 4000
    assert buffer.kind is expected
    charged = manager.device.sample().alloc_live
    assert charged == (0 if kind in HOST_KINDS else 4096)
    buffer.release()
    assert memory_counters.snapshot() == before
    assert memory_counters.delta(expected) == -4000


def test_uvm_is_managed() -> None:
    assert MemoryKind.UVM is MemoryKind.MANAGED
    assert MemoryKind.parse("uvm") is MemoryKind.MANAGED


@pytest.mark.parametrize("kind", ["gpu", "cpu", "pinned", "managed", "pinned_pool"])
def test_allocate_by_kind(manager: BufferManager, kind: str) -> None:
    with manager.allocate(kind, (2, 3), "int32") as buffer:
        assert (buffer.kind, buffer.shape, buffer.nbytes) == (MemoryKind(kind), (2, 3), 24)


def test_allocate_takes_no_nvls_and_no_nonsense(manager: BufferManager) -> None:
    for kind in ("nvls", "disk"):
        with pytest.raises(ConfigError):
            manager.allocate(kind, 10)


@pytest.mark.parametrize(
    ("size", "dtype", "shape", "nbytes"),
    [
        (10, "uint8", (10,), 10),
        ((2, 3, 4), "bfloat16", (2, 3, 4), 48),
        ([5, 2], torch.float32, (5, 2), 40),
        (7, np.int64, (7,), 56),
        (np.int64(3), np.dtype("float16"), (3,), 6),
        (torch.Size([4]), torch.bool, (4,), 4),
        ((), "int32", (), 4),
        (9, "float8_e4m3fn", (9,), 9),
    ],
)
def test_sizes_and_dtypes(any_device: Device, size: Any, dtype: Any, shape: tuple[int, ...], nbytes: int) -> None:
    manager = BufferManager(any_device.create_stream())
    with manager.gpu(size, dtype) as buffer:
        tensor = buffer.as_tensor()
        assert (buffer.shape, buffer.nbytes, buffer.capacity_bytes) == (shape, nbytes, nbytes)
        assert buffer.size == tensor.numel()
        assert tuple(tensor.shape) == shape
        assert tensor.element_size() * tensor.numel() == nbytes
        assert str(tensor.dtype) == f"torch.{buffer.dtype}"
        assert tensor.device == torch.device(any_device.torch_device)


@pytest.mark.parametrize("size", [0, (0,), (3, 0, 5)])
@pytest.mark.parametrize("kind", ["gpu", "gpu_sync", *HOST_KINDS])
def test_zero_size_is_a_valid_buffer_without_a_driver_call(manager: BufferManager, size: Any, kind: str) -> None:
    device = manager.device
    device.faults.arm("pool_grow")
    device.faults.arm("host")
    device.faults.arm("blocking")
    with getattr(manager, kind)(size, "float32") as buffer:
        assert (buffer.nbytes, buffer.data_ptr) == (0, 0)
        assert buffer.as_tensor().numel() == 0
        assert tuple(buffer.as_tensor().shape) == buffer.shape
        manager.set_zero(buffer)
        manager.copy(buffer, buffer)
    assert device.faults.calls == {}
    with pytest.raises(UseAfterFreeError):
        buffer.as_tensor()


@pytest.mark.parametrize("size", [-1, (3, -1), 1.5, "10", None, True])
def test_sizes_that_are_none(manager: BufferManager, size: Any) -> None:
    for kind in ("gpu", "gpu_sync", *HOST_KINDS):
        with pytest.raises(ConfigError):
            getattr(manager, kind)(size)


@pytest.mark.parametrize("dtype", ["float7", 3, None, [], object()])
def test_dtypes_that_are_none(manager: BufferManager, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        manager.gpu(1, dtype)


@pytest.mark.parametrize("kind", ["gpu", "gpu_sync", "managed", *HOST_KINDS])
@pytest.mark.parametrize("size", [2**62, (2**40, 2**40)])
def test_huge_sizes_are_out_of_memory_with_numbers(manager: BufferManager, kind: str, size: Any) -> None:
    with pytest.raises(AllocationError) as failure:
        getattr(manager, kind)(size, owner="huge")
    requested = size if isinstance(size, int) else 2**80
    assert abs(failure.value.requested_bytes - requested) < 4096  # the pinned pool counts whole pages
    assert 0 < failure.value.free_bytes < requested
    assert failure.value.owner == "huge"
    assert manager.device.used_bytes() == 0
    assert manager.device.host_bytes == 0


def test_a_huge_virtual_buffer_leaves_no_reservation(manager: BufferManager) -> None:
    with virtual_memory_scope("huge"), pytest.raises(AllocationError):
        manager.gpu(1024 * MIB)
    assert manager.device.vmm.counts().reservations == 0


def test_a_manager_needs_a_stream() -> None:
    with pytest.raises(StateError, match="undefined stream"):
        BufferManager(None)  # type: ignore[arg-type]


def test_a_closed_manager_refuses_and_its_buffers_live_on(manager: BufferManager) -> None:
    buffer = manager.gpu(10)
    manager.close()
    for refused in (lambda: manager.gpu(1), lambda: manager.cpu(1), lambda: manager.set_zero(buffer)):
        with pytest.raises(StateError, match="closed"):
            refused()
    assert buffer.data_ptr
    buffer.release()


@pytest.mark.parametrize("kind", ["gpu", "gpu_sync", "managed", *HOST_KINDS])
def test_after_release_everything_is_refused(manager: BufferManager, kind: str) -> None:
    buffer = getattr(manager, kind)(100)
    buffer.release()
    for refused in (
        buffer.release,
        buffer.as_tensor,
        buffer.as_numpy,
        buffer.__dlpack__,
        lambda: buffer.data_ptr,
        lambda: buffer.resize(5),
        lambda: buffer.record_use(manager.stream),
        lambda: manager.set_zero(buffer),
    ):
        with pytest.raises(UseAfterFreeError):
            refused()
    assert manager.device.sample().alloc_live == 0


def test_a_context_manager_releases_once(manager: BufferManager) -> None:
    with manager.gpu(100) as buffer:
        buffer.release()
    assert buffer.released


def test_resize_keeps_storage_within_capacity(manager: BufferManager) -> None:
    with manager.gpu(1000, "float32", owner="grown") as buffer:
        address = buffer.data_ptr
        buffer.resize(10)
        assert (buffer.size, buffer.nbytes, buffer.shape, buffer.capacity_bytes) == (10, 40, (10,), 4000)
        assert buffer.data_ptr == address
        buffer.resize((10, 100))
        assert (buffer.data_ptr, buffer.shape) == (address, (10, 100))
        buffer.resize(5000)
        assert (buffer.nbytes, buffer.capacity_bytes) == (20000, 20000)
        assert buffer.as_tensor().shape == (5000,)
        assert manager.device.used_by_owner() == {"grown": 20480}
        with pytest.raises(ConfigError):
            buffer.resize(-1)


def test_a_resize_that_fails_changes_nothing(manager: BufferManager) -> None:
    with manager.gpu(1000) as buffer:
        address = buffer.data_ptr
        with pytest.raises(AllocationError):
            buffer.resize(2**40)
        assert (buffer.size, buffer.data_ptr) == (1000, address)


def test_an_empty_buffer_can_grow(manager: BufferManager) -> None:
    with manager.gpu(0) as buffer:
        buffer.resize(10)
        assert buffer.data_ptr


def test_copy_wants_equal_dtypes_and_sizes(manager: BufferManager) -> None:
    with manager.gpu(8, "float32") as a, manager.gpu(8, "int32") as b, manager.gpu(9, "float32") as c:
        with pytest.raises(ConfigError, match=r"float32.*int32"):
            manager.copy(a, b)
        with pytest.raises(ConfigError, match=r"32 B.*36"):
            manager.copy(a, c)


def test_copies_stay_on_one_device(make_device: Any) -> None:
    first, second = (BufferManager(make_device().create_stream()) for _ in range(2))
    with first.gpu(8) as a, second.gpu(8) as b, pytest.raises(ConfigError, match="device"):
        first.copy(a, b)
    with second.gpu(8) as b, pytest.raises(ConfigError, match="device"):
        first.set_zero(b)


@pytest.mark.parametrize("value", [-1, 256])
def test_fill_takes_a_byte(manager: BufferManager, value: int) -> None:
    with manager.gpu(8) as buffer, pytest.raises(ConfigError):
        manager.set_mem(buffer, value)


def test_host_copies_happen_at_once_and_device_copies_in_stream_order(manager: BufferManager) -> None:
    gate = QueueEvent()
    manager.stream.wait_event(gate)
    with manager.cpu(100) as a, manager.pinned(100) as b, manager.gpu(100) as c:
        pending = manager.stream.pending
        manager.copy(a, b)
        manager.set_mem(a, 3)
        assert manager.stream.pending == pending
        manager.copy(b, c)
        manager.set_mem(c, 3)
        assert manager.stream.pending == pending + 2
        gate.set()
        manager.stream.synchronize()


def test_copies_between_card_and_pageable_memory_are_counted(manager: BufferManager) -> None:
    with manager.cpu(100) as pageable, manager.pinned(100) as pinned, manager.gpu(100) as card:
        manager.copy(pinned, card)
        manager.copy(pinned, pageable)
        assert manager.device.pageable_copies == 0
        manager.copy(pageable, card)
        manager.copy(card, pageable)
        assert manager.device.pageable_copies == 2


def test_a_failed_copy_leaves_no_new_buffer(manager: BufferManager) -> None:
    with manager.gpu(100) as source, manager.device.faults.armed("copy"):
        with pytest.raises(RuntimeError):
            manager.copy_from(source)
        assert manager.device.sample().alloc_live == 512


def test_tensors_of_buffers_are_told_apart_from_allocations(any_device: Device) -> None:
    manager = BufferManager(any_device.create_stream())
    with manager.gpu((4, 4), "float32") as buffer:
        tensor = buffer.as_tensor()
        assert lies_in_buffer(tensor.untyped_storage())
        assert lies_in_buffer(tensor[1:, 2].untyped_storage())
    assert not lies_in_buffer(torch.empty(3).untyped_storage())


def test_views_keep_a_dropped_buffer_alive(manager: BufferManager) -> None:
    tensor = manager.gpu(1 * MIB, owner="viewed").as_tensor()[10:20]
    gc.collect()
    assert manager.device.used_by_owner() == {"viewed": 1 * MIB}
    del tensor
    gc.collect()
    assert manager.device.used_by_owner() == {}


def test_as_tensor_in_inference_mode_gives_an_ordinary_tensor(any_device: Device) -> None:
    manager = BufferManager(any_device.create_stream())
    with manager.gpu(4, "float32") as buffer:
        with torch.inference_mode():
            tensor = buffer.as_tensor()
        assert not tensor.is_inference()
        tensor.fill_(1.0)


def test_closed_manager_sends_pinned_pool_memory_back(manager: BufferManager) -> None:
    first, second = manager.pinned_pool(5000), manager.pinned_pool(5000)
    first.release()
    assert manager.device.host_bytes == 2 * 8192
    with manager.pinned_pool(6000):
        assert manager.device.host_bytes == 2 * 8192  # same number of pages: reused
    manager.close()
    assert manager.device.host_bytes == 8192
    second.release()
    assert manager.device.host_bytes == 0


class TestContents:
    """Only where bytes exist."""

    @pytest.fixture
    def manager(self, any_device: Device) -> BufferManager:
        if not any_device.has_contents:
            pytest.skip("the fake device holds no contents")
        return BufferManager(any_device.create_stream())

    @pytest.mark.parametrize("kind", ["gpu", "managed", *HOST_KINDS])
    def test_copy_round_trip(self, manager: BufferManager, kind: str) -> None:
        data = torch.arange(1000, dtype=torch.float32)
        there = manager.copy_from(data, kind)
        back = manager.copy_from(there, "cpu")
        manager.stream.synchronize()
        assert torch.equal(back.as_tensor(), data)
        there.release()
        back.release()

    def test_copy_from_numpy_and_strided_tensors(self, manager: BufferManager) -> None:
        array = np.arange(12, dtype="int64").reshape(3, 4)[:, ::2]
        with manager.copy_from(array) as buffer:
            assert buffer.shape == (3, 2)
            assert torch.equal(buffer.as_tensor().cpu(), torch.from_numpy(array.copy()))
        with manager.copy_from(torch.from_numpy(array.copy()).T) as buffer:
            assert torch.equal(buffer.as_tensor().cpu(), torch.from_numpy(array.copy()).T)
        with pytest.raises(ConfigError):
            manager.copy_from("text")

    def test_fill(self, manager: BufferManager) -> None:
        for kind in ("gpu", "pinned"):
            with manager.allocate(kind, 1000) as buffer:
                manager.set_mem(buffer, 0xAB)
                manager.stream.synchronize()
                assert bool((buffer.as_tensor() == 0xAB).all())
                manager.set_zero(buffer)
                manager.stream.synchronize()
                assert not bool(buffer.as_tensor().any())

    def test_two_views_are_the_same_bytes(self, manager: BufferManager) -> None:
        with manager.gpu((3, 5), "float32") as buffer:
            buffer.as_tensor().fill_(2.0)
            assert bool((buffer.as_tensor() == 2.0).all())
            assert buffer.as_tensor().data_ptr() == buffer.data_ptr
            assert torch.from_dlpack(buffer).data_ptr() == buffer.data_ptr

    def test_numpy_views_where_the_host_can_read(self, manager: BufferManager) -> None:
        with manager.pinned((2, 3), "int32") as buffer:
            buffer.as_numpy()[:] = 7
            assert buffer.as_tensor().tolist() == [[7, 7, 7], [7, 7, 7]]
        with manager.pinned(3, "bfloat16") as buffer, pytest.raises(ConfigError, match="as_tensor"):
            buffer.as_numpy()


def test_the_fake_device_has_no_bytes_to_read(make_device: Any) -> None:
    device = make_device()
    with BufferManager(device.create_stream()).gpu(8) as buffer:
        if device.has_contents:
            assert buffer.as_numpy().shape == (8,)
        else:
            with pytest.raises(StateError, match="no bytes"):
                buffer.as_numpy()


def test_released_tags_refuse_through_buffers(manager: BufferManager) -> None:
    with virtual_memory_scope("asleep"):
        buffer = manager.gpu(100)
    release_with_tag("asleep")
    other = manager.gpu(100)
    for refused in (lambda: buffer.data_ptr, buffer.as_tensor, lambda: manager.copy(buffer, other)):
        with pytest.raises(StateError, match="asleep"):
            refused()
    buffer.release()
