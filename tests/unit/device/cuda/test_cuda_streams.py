"""Streams, events and host functions in streams."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from onebudget.buffers import BufferManager
from onebudget.device.cuda import CudaDevice
from onebudget.device.streams import QueueEvent
from onebudget.errors import DeviceError, StateError


def test_host_functions_run_when_the_stream_reaches_them(device: CudaDevice) -> None:
    stream, seen = device.create_stream(), []
    stream.launch(lambda: seen.append(1))
    stream.launch(lambda: seen.append(2))
    assert (seen, stream.pending) == ([], 1)
    stream.synchronize()
    assert (seen, stream.pending) == ([1, 2], 0)


def test_errors_of_host_functions_come_out_once(device: CudaDevice) -> None:
    stream = device.create_stream()
    stream.launch(lambda: 1 / 0)  # type: ignore[arg-type]
    stream.drain()
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    stream.synchronize()


def test_a_host_function_cannot_wait_for_its_stream(device: CudaDevice) -> None:
    stream = device.create_stream()
    stream.launch(stream.synchronize)
    with pytest.raises(StateError, match="can't wait"):
        stream.synchronize()


def test_a_launch_the_driver_refuses_is_forgotten(api: Any, device: CudaDevice) -> None:
    stream, seen = device.create_stream(), []
    api.fail("cuLaunchHostFunc", 700)
    with pytest.raises(DeviceError):
        stream.launch(lambda: seen.append(1))
    stream.synchronize()
    assert seen == []


def test_events(api: Any, device: CudaDevice) -> None:
    first, second = device.create_stream(), device.create_stream()
    first.launch(lambda: None)
    event = first.record_event()
    assert not event.query()
    second.wait_event(event)
    assert ("cuStreamWaitEvent", second.handle, event._handle, 0) in api.calls  # type: ignore[attr-defined]
    event.synchronize()
    assert event.query()
    assert len(api.events) == 1
    del event
    gc.collect()
    assert api.events == set()


def test_an_event_of_the_host_holds_a_stream(device: CudaDevice) -> None:
    stream, gate = device.create_stream(), QueueEvent()
    gate.set()
    stream.wait_event(gate)
    assert stream.pending == 0
    late = QueueEvent()
    stream.wait_event(late)
    assert stream.pending == 1
    late.set()
    stream.synchronize()


def test_record_use_orders_the_free(api: Any, manager: BufferManager, device: CudaDevice) -> None:
    other = device.create_stream()
    buffer = manager.gpu(512)
    buffer.record_use(other)
    api.calls.clear()
    buffer.release()
    names = [name for name, *_ in api.calls if "Current" not in name]
    assert names == ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy", "cuMemFreeAsync"]


def test_a_closed_stream_refuses(api: Any, device: CudaDevice) -> None:
    stream = device.create_stream()
    stream.close()
    stream.close()
    assert api.names().count("cuStreamDestroy") == 1
    assert stream.pending == 0
    stream.drain()
    for refused in (lambda: stream.launch(lambda: None), stream.record_event, lambda: stream.wait_event(QueueEvent())):
        with pytest.raises(StateError, match="closed"):
            refused()


def test_a_forgotten_stream_goes_back(api: Any, device: CudaDevice) -> None:
    device.create_stream()
    gc.collect()
    assert api.names().count("cuStreamDestroy") == 1
    assert "streams" not in api.left()


def test_a_driver_error_waits_for_synchronize(api: Any, device: CudaDevice) -> None:
    stream = device.create_stream()
    api.fail("cuStreamSynchronize", 700)
    stream.drain()
    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        stream.synchronize()
    stream.synchronize()


def test_streams_are_ordered_with_the_null_stream(api: Any, device: CudaDevice) -> None:
    device.create_stream()
    assert ("cuStreamCreate", 0) in api.calls  # flag 1 would make it independent of torch's default stream
