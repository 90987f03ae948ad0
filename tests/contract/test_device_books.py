"""The books of a device: what fits, who holds it, and what comes back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from onebudget.buffers import BufferManager
from onebudget.device.base import Device
from onebudget.errors import AllocationError, ConfigError, StateError
from onebudget.units import GIB, KIB, MIB


def test_a_new_device_is_free(make_device: Any) -> None:
    device = make_device(capacity_bytes=8 * MIB)
    assert device.total_bytes == device.free_bytes() == 8 * MIB
    assert device.used_bytes() == 0
    sample = device.sample()
    assert (sample.total, sample.free, sample.alloc_live, sample.alloc_peak) == (8 * MIB, 8 * MIB, 0, 0)


def test_other_processes_take_from_free_and_not_from_live(make_device: Any) -> None:
    device = make_device(capacity_bytes=8 * MIB, others_bytes=3 * MIB)
    assert device.used_bytes() == 3 * MIB
    assert device.sample().alloc_live == 0
    manager = BufferManager(device.create_stream())
    with manager.gpu(5 * MIB), pytest.raises(AllocationError):
        manager.gpu(1)


def test_readings_agree_on_every_device(any_device: Device) -> None:
    manager = BufferManager(any_device.create_stream())
    any_device.reset_peak()
    before = any_device.sample()
    with manager.gpu(3 * MIB, owner="test") as buffer:
        after = any_device.sample()
        assert after.alloc_live - before.alloc_live == 3 * MIB
        assert after.alloc_peak >= before.alloc_live + 3 * MIB
        assert after.total == any_device.total_bytes
        assert any_device.used_by_owner()["test"] == 3 * MIB
        assert buffer.data_ptr % 512 == 0
    any_device.synchronize()
    assert any_device.sample().alloc_live == before.alloc_live
    assert "test" not in any_device.used_by_owner()
    assert any_device.peak_by_owner()["test"] == 3 * MIB


@pytest.mark.parametrize("pool_supported", [True, False])
@pytest.mark.parametrize("step", [512, 4 * KIB, 36 * KIB + 512, 1 * MIB])
def test_fill_to_the_byte_and_one_more_fails(make_device: Any, step: int, pool_supported: bool) -> None:
    device = make_device(capacity_bytes=2 * MIB, pool_supported=pool_supported)
    manager = BufferManager(device.create_stream())
    physical_step = step if pool_supported else -(-step // 4096) * 4096
    buffers = [manager.gpu(step) for _ in range(2 * MIB // physical_step)]
    rest = 2 * MIB - physical_step * len(buffers)
    if rest:
        buffers.append(manager.gpu(rest))
    assert device.free_bytes() == 0
    with pytest.raises(AllocationError) as failure:
        manager.gpu(1, owner="one more")
    assert (failure.value.requested_bytes, failure.value.free_bytes) == (1, 0)
    assert failure.value.owner == "one more"
    for buffer in buffers:
        buffer.release()
    with manager.gpu(2 * MIB):
        assert device.free_bytes() == 0


def test_capacity_is_exact_after_any_history_without_live_blocks(manager: BufferManager) -> None:
    sizes = [513, 4097, 1 * MIB, 3 * MIB + 1, 7 * KIB, 20 * MIB]
    live = [manager.gpu(size) for size in sizes * 2]
    for buffer in live[::2] + live[1::2]:
        buffer.release()
    with manager.gpu(64 * MIB):
        assert manager.device.free_bytes() == 0


def test_idle_memory_between_live_blocks_goes_back_before_a_request_fails(make_device: Any) -> None:
    device = make_device(capacity_bytes=1 * MIB)
    manager = BufferManager(device.create_stream())
    blocks = [manager.gpu(64 * KIB) for _ in range(16)]
    for block in blocks[::2]:
        block.release()
    assert device.free_bytes() == 0
    assert manager.pool_stats().free == 512 * KIB
    with manager.gpu(512 * KIB):
        assert device.free_bytes() == 0


def test_an_idle_tail_is_extended_when_nothing_else_fits(make_device: Any) -> None:
    device = make_device(capacity_bytes=8 * KIB)
    manager = BufferManager(device.create_stream())
    with manager.gpu(512), manager.gpu(8 * KIB - 512):
        assert device.free_bytes() == 0


@pytest.mark.parametrize("path", ["tensor", "gpu_sync", "managed", "virtual"])
def test_idle_pool_memory_makes_room_for_every_other_consumer(make_device: Any, path: str) -> None:
    device = make_device(capacity_bytes=4 * MIB)
    manager = BufferManager(device.create_stream())
    manager.gpu(3 * MIB).release()
    assert device.free_bytes() == 1 * MIB
    if path == "tensor":
        device.charge_tensor_bytes(4 * MIB)
        device.refund_tensor_bytes(4 * MIB)
    elif path == "virtual":
        device.vmm.release(device.vmm.create(4 * MIB, owner="test"))
    else:
        getattr(manager, path)(4 * MIB).release()
    assert device.free_bytes() == 4 * MIB


def test_tensors_and_buffers_share_one_capacity(make_device: Any) -> None:
    device = make_device(capacity_bytes=4 * MIB)
    manager = BufferManager(device.create_stream())
    device.charge_tensor_bytes(1 * MIB)
    with manager.gpu(3 * MIB):
        assert device.free_bytes() == 0
        assert device.sample().alloc_live == 4 * MIB
        with pytest.raises(AllocationError) as failure:
            device.charge_tensor_bytes(512, "logits")
        assert (failure.value.requested_bytes, failure.value.free_bytes, failure.value.owner) == (512, 0, "logits")
        assert device.used_by_owner() == {"buffers": 3 * MIB, "tensors": 1 * MIB}
    device.refund_tensor_bytes(1 * MIB)
    assert device.sample().alloc_live == 0


def test_live_rounds_each_allocation_to_512_and_used_to_the_granule(make_device: Any) -> None:
    device = make_device(capacity_bytes=4 * MIB)
    manager = BufferManager(device.create_stream())
    with manager.gpu_sync(1000, owner="a"), manager.gpu(1, owner="b"):
        assert device.used_by_owner() == {"a": 1024, "b": 512}
        assert device.sample().alloc_live == 1536
        assert device.used_bytes() == 2 * 4096


def test_peak_is_a_high_water_mark_since_reset(manager: BufferManager) -> None:
    device = manager.device
    manager.gpu(5 * MIB, owner="early").release()
    assert device.sample().alloc_peak == 5 * MIB
    device.reset_peak()
    assert device.sample().alloc_peak == 0
    assert device.peak_by_owner() == {}
    with manager.gpu(2 * MIB, owner="late"), manager.gpu(1 * MIB, owner="late"):
        pass
    assert device.sample().alloc_peak == 3 * MIB
    assert device.peak_by_owner() == {"late": 3 * MIB}


def test_empty_cache_returns_idle_pool_memory(manager: BufferManager) -> None:
    manager.gpu(5 * MIB).release()
    assert manager.device.used_bytes() == 5 * MIB
    manager.device.empty_cache()
    assert manager.device.used_bytes() == 0


def test_32_threads_make_one_pool(any_device: Device) -> None:
    made = []
    real = any_device._create_pool
    any_device._create_pool = lambda: made.append(1) or real()  # type: ignore[method-assign,func-returns-value]
    start = threading.Barrier(32)
    pools: list[object] = []

    def ask() -> None:
        start.wait()
        pools.append(any_device.primary_pool())

    threads = [threading.Thread(target=ask) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(pools) == 32
    assert all(pool is pools[0] for pool in pools)


def test_a_failed_pool_is_remembered_and_callers_fall_back(make_device: Any) -> None:
    device = make_device()
    with device.faults.armed("pool"):
        assert device.primary_pool() is None
    assert device.primary_pool() is None
    manager = BufferManager(device.create_stream())
    assert manager.pool_stats() == manager.pool_stats(sync=True)
    assert manager.pool_stats().reserved == 0
    manager.pool_trim_to(0)
    with manager.gpu(1 * MIB):
        assert device.account.blocking_bytes == 1 * MIB


def test_a_device_without_pool_support_never_tries(make_device: Any) -> None:
    device = make_device(pool_supported=False)
    device.faults.arm("pool")
    assert device.primary_pool() is None
    assert device.faults.calls.get("pool", 0) == 0


def test_device_numbers_end_at_63(device: Device) -> None:
    device.index = 64
    with pytest.raises(ConfigError, match="63"):
        device.primary_pool()


def test_close_is_idempotent_and_refuses_from_then_on(device: Device) -> None:
    stream = device.create_stream()
    manager = BufferManager(stream)
    buffer = manager.gpu(100)
    device.close()
    device.close()
    for refused in (
        lambda: buffer.data_ptr,
        buffer.as_tensor,
        device.create_stream,
        lambda: manager.gpu(1),
        lambda: manager.gpu_sync(1),
        lambda: manager.cpu(1),
        device.synchronize,
        lambda: BufferManager(stream),
    ):
        with pytest.raises(StateError):
            refused()
    buffer.release()


def test_charges_from_many_threads_balance(device: Device) -> None:
    def churn() -> None:
        for _ in range(300):
            device.charge_tensor_bytes(1024, "churn")
            device.refund_tensor_bytes(1024, "churn")

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.used_bytes() == 0
    assert device.used_by_owner() == {}


def test_a_refund_inside_a_locked_section_is_booked_later(device: Device) -> None:
    device.charge_tensor_bytes(1024)
    with device.account.lock:  # what a finalizer meets when the collector runs inside one
        device.refund_tensor_bytes(1024)
        assert device.account.used_bytes == 1024
    assert device.used_bytes() == 0


def test_facts_say_where_they_were_read(any_device: Device) -> None:
    facts = any_device.facts
    assert facts.total_bytes == any_device.total_bytes
    assert facts.granularity_bytes > 0
    for name in ("total_bytes", "granularity_bytes", "pool_supported", "vmm_supported"):
        assert facts.source(name) != "assumed"


def test_the_capacity_may_be_larger_than_any_machine(make_device: Any) -> None:
    device = make_device(capacity_bytes=192 * GIB)
    with BufferManager(device.create_stream()).gpu(192 * GIB):
        assert device.free_bytes() == 0
