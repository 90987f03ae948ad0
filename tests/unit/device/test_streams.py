from __future__ import annotations

import threading

import pytest

from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.device.streams import QueueEvent, QueueStream
from onebudget.errors import StateError, UseAfterFreeError


@pytest.fixture
def device() -> Device:
    return open_device("fake", capacity_bytes=1 << 20)


@pytest.fixture
def stream(device: Device) -> QueueStream:
    stream = device.create_stream()
    assert isinstance(stream, QueueStream)
    return stream


class Memory:
    """Something that work touches."""

    def __init__(self) -> None:
        self.freed = False

    def check_use(self) -> None:
        if self.freed:
            raise UseAfterFreeError("freed")


def test_an_idle_stream_works_on_the_calling_thread(stream: QueueStream) -> None:
    ran_on: list[threading.Thread] = []
    stream.run(lambda: ran_on.append(threading.current_thread()))
    assert ran_on == [threading.current_thread()]
    assert stream.pending == 0
    assert stream._worker is None


def test_order_is_kept_between_queued_and_direct_work(stream: QueueStream) -> None:
    order: list[int] = []
    gate = QueueEvent()
    stream.wait_event(gate)
    for number in range(5):
        (stream.run if number % 2 else stream.launch)(lambda number=number: order.append(number))  # type: ignore[misc]
    assert (order, stream.pending) == ([], 6)
    gate.set()
    stream.synchronize()
    assert order == [0, 1, 2, 3, 4]


def test_the_worker_ends_with_the_work_and_comes_back(stream: QueueStream) -> None:
    for _ in range(3):
        worker: list[threading.Thread] = []
        stream.launch(lambda worker=worker: worker.append(threading.current_thread()))  # type: ignore[misc]
        stream.synchronize()
        worker[0].join()
        assert stream._worker is None


def test_events_pass_when_the_work_before_them_is_done(stream: QueueStream) -> None:
    assert stream.record_event().query()
    gate = QueueEvent()
    stream.wait_event(gate)
    event = stream.record_event()
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()


def test_events_order_streams(device: Device) -> None:
    first, second = device.create_stream(), device.create_stream()
    order: list[str] = []
    gate = QueueEvent()
    first.wait_event(gate)
    first.launch(lambda: order.append("first"))
    second.wait_event(first.record_event())
    second.launch(lambda: order.append("second"))
    gate.set()
    second.synchronize()
    assert order == ["first", "second"]


def test_errors_of_queued_work_surface_once_and_the_rest_runs(stream: QueueStream) -> None:
    order: list[int] = []
    stream.launch(lambda: 1 // 0 and None)  # type: ignore[func-returns-value]
    stream.launch(lambda: {}["missing"])
    stream.launch(lambda: order.append(1))
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    stream.synchronize()
    assert order == [1]


def test_errors_of_direct_work_are_raised_there(stream: QueueStream) -> None:
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 // 0 and None)  # type: ignore[func-returns-value]
    stream.synchronize()


def test_drain_leaves_the_error_for_synchronize(stream: QueueStream) -> None:
    stream.launch(lambda: 1 // 0 and None)  # type: ignore[func-returns-value]
    stream.drain()
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()


def test_work_whose_memory_is_gone_does_not_run(stream: QueueStream) -> None:
    ran: list[int] = []
    memory = Memory()
    stream.run(lambda: ran.append(1), (memory,))
    gate = QueueEvent()
    stream.wait_event(gate)
    stream.launch(lambda: ran.append(2), (memory,))
    memory.freed = True
    gate.set()
    with pytest.raises(UseAfterFreeError):
        stream.synchronize()
    with pytest.raises(UseAfterFreeError):
        stream.run(lambda: ran.append(3), (memory,))
    assert ran == [1]


def test_work_can_not_wait_for_its_own_stream(stream: QueueStream) -> None:
    stream.launch(stream.synchronize)
    with pytest.raises(StateError, match="wait for that stream"):
        stream.synchronize()


def test_device_synchronize_raises_what_streams_kept(device: Device) -> None:
    stream = device.create_stream()
    stream.launch(lambda: 1 // 0 and None)  # type: ignore[func-returns-value]
    with pytest.raises(ZeroDivisionError):
        device.synchronize()


def test_device_synchronize_waits_for_all_streams_before_it_raises(device: Device) -> None:
    first, second = device.create_stream(), device.create_stream()
    done: list[int] = []
    for stream in (first, second):
        stream.launch(lambda: 1 // 0 and None)  # type: ignore[func-returns-value]
        stream.launch(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    assert done == [1, 1]


def test_closed_streams_finish_and_refuse(stream: QueueStream) -> None:
    order: list[int] = []
    stream.launch(lambda: order.append(1))
    stream.close()
    stream.close()
    assert order == [1]
    for refused in (stream.run, stream.launch):
        with pytest.raises(StateError, match="closed"):
            refused(lambda: None)


def test_closing_a_device_closes_its_streams(device: Device) -> None:
    stream = device.create_stream()
    device.close()
    with pytest.raises(StateError, match="closed"):
        stream.launch(lambda: None)


def test_many_threads_submit_to_one_stream(stream: QueueStream) -> None:
    inside = threading.Lock()
    done: list[int] = []

    def work() -> None:
        assert inside.acquire(blocking=False), "two pieces of work ran at once"
        done.append(1)
        inside.release()

    def submit() -> None:
        for number in range(100):
            (stream.run if number % 3 else stream.launch)(work)

    threads = [threading.Thread(target=submit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert len(done) == 600
