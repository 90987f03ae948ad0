"""Frees that are only noted: every reading is as if they were booked at once, and the last one is handed out again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onebudget.buffers import BufferManager, MemoryKind, memory_counters
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.device.streams import QueueEvent
from onebudget.errors import StateError, UseAfterFreeError
from onebudget.units import MIB


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=16 * MIB) as device:
        yield device


@pytest.fixture
def manager(device: Device) -> BufferManager:
    return BufferManager(device.create_stream())


def test_the_same_bytes_come_back_without_a_trace_in_the_books(manager: BufferManager) -> None:
    device = manager.device
    first = manager.gpu(1000)
    address = first.data_ptr
    first.release()
    with manager.gpu(1000) as again:
        assert again.data_ptr == address
        assert device.used_by_owner() == {"buffers": 1024}
        assert device.sample().alloc_peak == 1024
        assert manager.pool_stats().used == 1024
    assert device.used_by_owner() == {}
    assert manager.pool_stats().used == 0
    assert device.primary_pool().used_bytes() == 0  # type: ignore[union-attr]


def test_a_noted_free_raises_no_later_peak(manager: BufferManager) -> None:
    device = manager.device
    manager.gpu(1 * MIB).release()
    device.charge_tensor_bytes(1 * MIB)
    assert device.sample().alloc_peak == 1 * MIB
    device.refund_tensor_bytes(1 * MIB)
    manager.gpu(1 * MIB).release()
    with manager.gpu_sync(1 * MIB):
        assert device.sample().alloc_peak == 1 * MIB
    manager.gpu(1 * MIB).release()
    with manager.gpu(2 * MIB):
        assert device.sample().alloc_peak == 2 * MIB


def test_another_owner_or_size_is_booked(manager: BufferManager) -> None:
    device = manager.device
    manager.gpu(1000, owner="a").release()
    with manager.gpu(1000, owner="b"):
        assert device.used_by_owner() == {"b": 1024}
        assert device.peak_by_owner() == {"a": 1024, "b": 1024}
    before = memory_counters.current(MemoryKind.GPU)
    manager.gpu(1000).release()
    with manager.gpu(1001):  # the same 1024 B, but counted as asked for
        assert memory_counters.current(MemoryKind.GPU) - before == 1001


def test_counters_follow_the_call_and_not_the_stream(manager: BufferManager) -> None:
    before = memory_counters.current(MemoryKind.GPU)
    gate = QueueEvent()
    manager.stream.wait_event(gate)
    buffer = manager.gpu(1000)
    assert memory_counters.current(MemoryKind.GPU) - before == 1000
    buffer.release()
    assert manager.pool_stats().used == 1024
    assert (memory_counters.current(MemoryKind.GPU), memory_counters.delta(MemoryKind.GPU)) == (before, -1000)
    gate.set()
    manager.stream.synchronize()
    assert memory_counters.current(MemoryKind.GPU) == before


def test_bytes_handed_out_again_can_be_freed_once(manager: BufferManager) -> None:
    pool = manager.device.primary_pool()
    assert pool is not None
    old = pool.allocate(1000, manager.stream, "test")
    pool.deallocate(old, manager.stream)
    new = pool.allocate(1000, manager.stream, "test")
    assert new.address == old.address
    with pytest.raises(UseAfterFreeError):
        pool.deallocate(old, manager.stream)
    new.check_use()
    pool.deallocate(new, manager.stream)


def test_noted_frees_can_be_trimmed_and_fill_the_card(manager: BufferManager) -> None:
    manager.gpu(9 * MIB).release()
    manager.pool_trim_to(0)
    assert manager.device.used_bytes() == 0
    manager.gpu(9 * MIB).release()
    with manager.gpu(16 * MIB):
        assert manager.device.free_bytes() == 0


def test_a_closed_device_hands_nothing_out_again(device: Device) -> None:
    stream = device.create_stream()
    pool = device.primary_pool()
    assert pool is not None
    before = memory_counters.current(MemoryKind.GPU)
    kept, late = pool.allocate(1000, stream, "test"), pool.allocate(1000, stream, "test")
    pool.deallocate(kept, stream)
    device.close()
    assert memory_counters.current(MemoryKind.GPU) == before
    pool.deallocate(late, None)
    with pytest.raises(StateError):
        pool.allocate(1000, None, "test")
    assert memory_counters.current(MemoryKind.GPU) == before
