"""The stream-ordered pool: reserved, used, free; frees that are on their way; trimming."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from onebudget.buffers import Buffer, BufferManager
from onebudget.device.base import Device
from onebudget.device.streams import QueueEvent
from onebudget.errors import ConfigError, UseAfterFreeError
from onebudget.units import KIB, MIB


def stats_mib(manager: BufferManager, sync: bool = False) -> tuple[int, int, int]:
    stats = manager.pool_stats(sync=sync)
    return stats.reserved // MIB, stats.used // MIB, stats.free // MIB


def test_trace_of_reserved_used_and_free(make_device: Any) -> None:
    device = make_device(granularity_bytes=2 * MIB)
    stream = device.create_stream()
    manager = BufferManager(stream)
    a = manager.gpu(6 * MIB)
    assert stats_mib(manager) == (6, 6, 0)
    gate = QueueEvent()
    stream.wait_event(gate)
    a.release()
    assert stats_mib(manager) == (6, 6, 0)
    gate.set()
    assert stats_mib(manager, sync=True) == (6, 0, 6)
    b = manager.gpu(4 * MIB)
    assert stats_mib(manager) == (6, 4, 2)
    manager.pool_trim_to(0)
    assert stats_mib(manager) == (4, 4, 0)  # anything from 4 to 6 would do; here whole idle granules go back
    b.release()
    stream.synchronize()
    manager.pool_trim_to(2 * MIB)
    assert stats_mib(manager) == (2, 0, 2)
    manager.pool_trim_to(0)
    assert stats_mib(manager) == (0, 0, 0)


def test_statistics_do_not_wait_for_the_stream(manager: BufferManager) -> None:
    gate = QueueEvent()
    manager.stream.wait_event(gate)
    manager.gpu(1 * MIB).release()
    assert manager.pool_stats().used == 1 * MIB
    assert manager.stream.pending == 2
    gate.set()
    assert manager.pool_stats(sync=True).used == 0


def test_a_loop_of_one_size_keeps_reserved_constant(manager: BufferManager) -> None:
    manager.gpu(3 * MIB).release()
    reserved = manager.pool_stats().reserved
    for _ in range(50):
        with manager.gpu(3 * MIB):
            assert manager.pool_stats().reserved == reserved
    assert manager.pool_stats() == type(manager.pool_stats())(reserved, 0, reserved)


def test_small_buffers_share_a_granule(make_device: Any) -> None:
    device = make_device(granularity_bytes=2 * MIB)
    manager = BufferManager(device.create_stream())
    buffers = [manager.gpu(512) for _ in range(100)]
    assert manager.pool_stats().reserved == 2 * MIB
    assert manager.pool_stats().used == 100 * 512
    assert len({buffer.data_ptr for buffer in buffers}) == 100


def test_trim_never_frees_used_memory_and_keeps_what_it_was_told_to(manager: BufferManager) -> None:
    live = manager.gpu(1 * MIB)
    manager.gpu(8 * MIB).release()
    manager.pool_trim_to(5 * MIB)
    assert manager.pool_stats().reserved == 5 * MIB
    manager.pool_trim_to(0)
    assert manager.pool_stats().reserved == 1 * MIB
    assert live.data_ptr
    manager.pool_trim_to(0)
    assert manager.pool_stats().reserved == 1 * MIB


def test_trim_takes_no_negative_size(manager: BufferManager) -> None:
    with pytest.raises(ConfigError):
        manager.pool_trim_to(-1)


def test_closing_a_manager_trims_when_asked_to(device: Device) -> None:
    stream = device.create_stream()
    for trim_pool, reserved in ((False, 4 * MIB), (True, 0)):
        manager = BufferManager(stream, trim_pool=trim_pool)
        manager.gpu(4 * MIB).release()
        manager.close()
        manager.close()
        assert device.used_bytes() == reserved


def test_a_dropped_manager_trims_like_a_closed_one(device: Device) -> None:
    manager = BufferManager(device.create_stream(), trim_pool=True)
    manager.gpu(4 * MIB).release()
    manager.pinned_pool(5000).release()
    assert (device.used_bytes(), device.host_bytes) == (4 * MIB, 8192)
    del manager
    gc.collect()
    assert (device.used_bytes(), device.host_bytes) == (0, 0)


def test_one_pool_serves_all_managers_of_a_device(device: Device) -> None:
    first, second = BufferManager(device.create_stream()), BufferManager(device.create_stream())
    first.gpu(2 * MIB).release()
    with second.gpu(2 * MIB):
        assert first.pool_stats().reserved == 2 * MIB


def test_freed_bytes_are_not_reused_before_the_stream_passes_the_free(manager: BufferManager) -> None:
    gate = QueueEvent()
    manager.stream.wait_event(gate)
    first = manager.gpu(1 * MIB)
    address = first.data_ptr
    first.release()
    second = manager.gpu(1 * MIB)
    assert second.data_ptr != address
    gate.set()
    manager.stream.synchronize()
    assert manager.gpu(1 * MIB).data_ptr == address


def test_a_request_that_needs_issued_frees_waits_for_them(make_device: Any) -> None:
    device = make_device(capacity_bytes=4 * MIB)
    stream = device.create_stream()
    manager = BufferManager(stream)
    passed = QueueEvent()
    buffer = manager.gpu(4 * MIB)
    stream.launch(passed.set)
    buffer.release()
    with manager.gpu(4 * MIB):
        assert passed.query()


def queued_copy(device: Device) -> tuple[BufferManager, BufferManager, Buffer, Buffer, QueueEvent]:
    """A copy on a second stream that waits at a gate, from a buffer of the first stream."""
    owner, other = BufferManager(device.create_stream()), BufferManager(device.create_stream())
    source, target = owner.gpu(64 * KIB), other.gpu(64 * KIB)
    gate = QueueEvent()
    other.stream.wait_event(gate)
    other.copy(source, target)
    return owner, other, source, target, gate


def test_use_on_another_stream_after_the_free_passed_is_caught(device: Device) -> None:
    _, other, source, _target, gate = queued_copy(device)
    source.release()  # the owning stream is idle: the free passes at once
    gate.set()
    with pytest.raises(UseAfterFreeError, match="record_use"):
        other.stream.synchronize()
    other.stream.synchronize()  # an error is raised once


def test_record_use_lets_the_free_wait_for_the_other_stream(device: Device) -> None:
    owner, other, source, _target, gate = queued_copy(device)
    source.record_use(other.stream)
    source.release()
    assert owner.pool_stats().used == 128 * KIB
    gate.set()
    other.stream.synchronize()
    owner.stream.synchronize()
    assert owner.pool_stats().used == 64 * KIB


def test_an_event_orders_two_streams(device: Device) -> None:
    owner, other, source, _target, gate = queued_copy(device)
    owner.stream.wait_event(other.stream.record_event())
    source.release()
    gate.set()
    other.stream.synchronize()
    owner.stream.synchronize()


def test_a_released_buffer_is_refused_at_once(manager: BufferManager) -> None:
    gone, target = manager.gpu(100), manager.gpu(100)
    gone.release()
    with pytest.raises(UseAfterFreeError):
        manager.copy(gone, target)
    with pytest.raises(UseAfterFreeError):
        manager.set_zero(gone)


def test_a_dropped_buffer_frees_itself(manager: BufferManager) -> None:
    manager.gpu(1 * MIB, owner="dropped")
    assert manager.device.used_by_owner() == {}
    assert manager.pool_stats().used == 0
