"""What a stand-in can't show: that the driver and torch do with our memory what they promise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from onebudget.buffers import BufferManager, materialize_with_tag, release_with_tag, virtual_memory_scope
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import AllocationError, DeviceError
from onebudget.units import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("cuda:0") as device:
        yield device


@pytest.fixture
def manager(device: Device) -> BufferManager:
    return BufferManager(device.create_stream())


def test_facts_agree_with_torch(device: Device) -> None:
    free, total = torch.cuda.mem_get_info(0)
    assert device.total_bytes == total
    assert abs(device.free_bytes() - free) <= 64 * MIB  # others may come and go
    assert device.name == torch.cuda.get_device_name(0)
    assert device.facts.granularity_bytes % device.facts.os_page_bytes == 0
    assert device.account.others_bytes <= total - free


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float8_e4m3fn", "float16", "float32", "int64", "bool"])
@pytest.mark.parametrize("call", ["gpu", "gpu_sync", "managed", "virtual"])
def test_torch_reads_and_writes_every_kind(manager: BufferManager, call: str, dtype: str) -> None:
    with virtual_memory_scope("kinds") if call == "virtual" else nullcontext():
        buffer = getattr(manager, "gpu" if call == "virtual" else call)((3, 5), dtype)
    tensor = buffer.as_tensor()
    data = (torch.arange(15).view(3, 5) % 2).to(getattr(torch, dtype))
    tensor.copy_(data)
    assert (tensor.device.type, tensor.data_ptr()) == ("cuda", buffer.data_ptr)
    assert torch.equal(tensor.cpu().view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(buffer.as_tensor().cpu().view(torch.uint8), data.view(torch.uint8))
    del tensor
    buffer.release()


def test_kernels_run_on_virtual_memory(manager: BufferManager) -> None:
    with virtual_memory_scope("matrix"):
        buffers = [manager.gpu((512, 512), "float32") for _ in range(3)]
    a, b, c = (buffer.as_tensor() for buffer in buffers)
    a.fill_(1.0)
    b.fill_(2.0)
    torch.matmul(a, b, out=c)
    assert bool((c == 1024.0).all())
    del a, b, c
    for buffer in buffers:
        buffer.release()


def test_streams_are_ordered_with_torchs_default_stream(manager: BufferManager) -> None:
    """Buffers are handed round between our stream and torch's without any event."""
    for value in range(50):
        with manager.gpu(16 * MIB) as first:
            manager.set_mem(first, value)
            seen = first.as_tensor().clone()
        with manager.gpu(16 * MIB) as second:
            manager.set_mem(second, 255)
            assert bool((seen == value).all())


def test_torch_can_work_on_our_stream(manager: BufferManager) -> None:
    stream: Any = manager.stream
    with torch.cuda.stream(stream.as_torch()), manager.gpu(1 * MIB) as buffer:
        tensor = buffer.as_tensor()
        tensor.fill_(3)
        assert torch.cuda.current_stream().cuda_stream == stream.stream_id
        assert int(tensor.sum(dtype=torch.int64)) == 3 * MIB
        del tensor


def test_host_functions_and_events(device: Device) -> None:
    first, second, seen = device.create_stream(), device.create_stream(), []
    gate = threading.Event()
    first.launch(lambda: gate.wait(10) and None)  # type: ignore[func-returns-value]
    first.launch(lambda: seen.append("first"))
    event = first.record_event()
    second.wait_event(event)
    second.launch(lambda: seen.append("second"))
    assert (first.pending, event.query()) == (1, False)
    gate.set()
    second.synchronize()
    assert seen == ["first", "second"]
    assert event.query()
    first.launch(lambda: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        first.synchronize()


def test_the_pool_keeps_freed_memory_until_it_is_trimmed(manager: BufferManager) -> None:
    device = manager.device
    manager.gpu(512 * MIB).release()
    stats = manager.pool_stats(sync=True)
    assert stats.reserved >= 512 * MIB
    assert stats.used == 0
    manager.stream.synchronize()
    assert manager.pool_stats().reserved == stats.reserved
    free = device.free_bytes()
    manager.pool_trim_to(0)
    assert manager.pool_stats().reserved < 512 * MIB
    assert device.free_bytes() - free >= 400 * MIB


def test_trimming_leaves_torchs_allocator_alone(manager: BufferManager) -> None:
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda:0")
    reserved = torch.cuda.memory_reserved(0)
    assert reserved >= 256 * MIB
    manager.gpu(64 * MIB).release()
    manager.pool_stats(sync=True)
    manager.pool_trim_to(0)
    assert torch.cuda.memory_reserved(0) == reserved
    manager.device.empty_cache()
    assert torch.cuda.memory_reserved(0) < 256 * MIB


def test_readings_hold_torchs_bytes_and_ours(manager: BufferManager) -> None:
    device = manager.device
    device.reset_peak()
    before = device.sample()
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:0")
    with manager.gpu(5 * MIB, owner="ours"):
        sample = device.sample()
        assert sample.alloc_live - before.alloc_live == 8 * MIB
        assert sample.used >= sample.alloc_live
        owners = device.used_by_owner()
        assert owners["ours"] == 5 * MIB
        assert sum(owners.values()) == sample.alloc_live
    del tensor
    assert device.sample().alloc_live == before.alloc_live
    assert device.sample().alloc_peak - before.alloc_live == 8 * MIB


def test_sleep_gives_memory_to_the_card_and_wake_takes_it_back(manager: BufferManager) -> None:
    device = manager.device
    with virtual_memory_scope("kv"):
        buffers = [manager.gpu(200 * MIB + 1) for _ in range(3)]
    addresses = [buffer.data_ptr for buffer in buffers]
    aligned = -(-(200 * MIB + 1) // device.vmm.alignment_bytes) * device.vmm.alignment_bytes
    free = device.free_bytes()
    assert release_with_tag("kv") == 3
    assert device.free_bytes() - free >= 3 * aligned - 8 * MIB
    assert materialize_with_tag("kv") == 3
    assert abs(device.free_bytes() - free) <= 8 * MIB
    assert [buffer.data_ptr for buffer in buffers] == addresses
    for buffer in buffers:
        buffer.release()


def test_a_captured_graph_is_valid_after_sleep(manager: BufferManager) -> None:
    with virtual_memory_scope("graph", "cpu"):
        buffers = [manager.gpu(1024, "float32") for _ in range(2)]
    x, y = (buffer.as_tensor() for buffer in buffers)
    x.fill_(1.0)
    y.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(x, 41.0, out=y)
    release_with_tag("graph")
    materialize_with_tag("graph")
    assert not bool(y.any())
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 42.0).all())
    del graph, x, y
    for buffer in buffers:
        buffer.release()


@pytest.mark.parametrize("call", ["gpu", "gpu_sync", "virtual"])
def test_too_much_is_an_allocation_error_and_the_device_goes_on(manager: BufferManager, call: str) -> None:
    device = manager.device
    with virtual_memory_scope("huge") if call == "virtual" else nullcontext():
        make = manager.gpu if call == "virtual" else getattr(manager, call)
        with pytest.raises(AllocationError) as failure:
            make(2 * device.total_bytes, owner="huge")
    error = failure.value
    assert (error.requested_bytes // MIB, error.owner) == (2 * device.total_bytes // MIB, "huge")
    assert 0 < error.free_bytes < device.total_bytes
    with manager.gpu(1 * MIB) as buffer:
        assert int(buffer.as_tensor().zero_().sum()) == 0


def test_idle_memory_of_either_pool_makes_room_for_the_other_consumer(manager: BufferManager) -> None:
    device = manager.device
    device.empty_cache()
    most = device.free_bytes() * 3 // 4
    manager.gpu(most).release()
    with manager.gpu_sync(most):
        pass
    torch.empty(most, dtype=torch.uint8, device="cuda:0")  # torch keeps it cached
    with manager.gpu_sync(most):
        pass
    device.empty_cache()


def test_other_statuses_are_device_errors_with_their_name(device: Any) -> None:
    with pytest.raises(DeviceError) as failure:
        device.context.call("cuMemAddressReserve", 4097, 0, 0, 0)
    assert (failure.value.name, failure.value.call) == ("CUDA_ERROR_INVALID_VALUE", "cuMemAddressReserve")
    assert failure.value.code == 1


def test_pinned_memory_is_pinned(manager: BufferManager) -> None:
    with manager.pinned(1 * MIB) as staging, manager.gpu(1 * MIB) as card:
        assert staging.as_tensor().is_pinned()
        manager.set_mem(staging, 5)
        manager.copy(staging, card)
        manager.stream.synchronize()
        assert bool((card.as_tensor() == 5).all())
        assert manager.device.pageable_copies == 0


def test_threads_share_a_device(device: Device) -> None:
    errors: list[BaseException] = []

    def churn() -> None:
        try:
            manager = BufferManager(device.create_stream())
            for size in range(1, 200):
                manager.gpu(size * 1000).release()
            manager.stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    device.synchronize()
    assert device.primary_pool().used_bytes() == 0  # type: ignore[union-attr]
    assert "buffers" not in device.used_by_owner()


def test_closing_gives_everything_back(device: Device) -> None:
    free = device.free_bytes()
    with open_device("cuda:0") as other:
        manager = BufferManager(other.create_stream())
        kept = [manager.gpu(256 * MIB), manager.gpu_sync(256 * MIB), manager.pinned(16 * MIB)]
        with virtual_memory_scope("left"):
            kept.append(manager.gpu(256 * MIB))
        assert free - device.free_bytes() >= 700 * MIB
    assert free - device.free_bytes() <= 64 * MIB
    for buffer in kept:
        buffer.release()
