"""Streams and events: the contract, and the implementation that host and fake devices share."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from onebudget.errors import StateError

if TYPE_CHECKING:
    from onebudget.device.base import Device


class Touchable(Protocol):
    """Memory that queued work reads or writes; refuses when it is gone by the time the work runs."""

    def check_use(self) -> None: ...


class Event(ABC):
    """A point in a stream's work."""

    __slots__ = ()

    @abstractmethod
    def query(self) -> bool:
        """Has the stream passed this point? Never waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the stream has passed this point."""


class Stream(ABC):
    """An ordered queue of work on one device. ``pending`` is 0 when everything submitted so far is done."""

    __slots__ = ()

    device: Device
    stream_id: int

    @property
    @abstractmethod
    def pending(self) -> int: ...

    @abstractmethod
    def launch(self, work: Callable[[], None], touches: Iterable[Touchable] = ()) -> None:
        """Queue a host function behind everything submitted so far and return at once."""

    @abstractmethod
    def record_event(self) -> Event:
        """An event that completes when everything submitted so far is done."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Work submitted from now on waits for ``event``, which may belong to another stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything submitted so far and raise the first error of queued work, once."""

    @abstractmethod
    def drain(self) -> None:
        """Wait like ``synchronize`` and leave any error for it."""

    @abstractmethod
    def close(self) -> None:
        """Drain, then refuse new work. Idempotent."""

    def runs_here(self) -> bool:
        """Is the calling thread executing this stream's work? Then it can't wait for the stream."""
        return False


class QueueEvent(Event):
    __slots__ = ("_passed",)

    def __init__(self, *, passed: bool = False) -> None:
        self._passed = threading.Event()
        if passed:
            self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()

    def set(self) -> None:
        """Mark the point as passed; also usable as a gate that holds a stream back."""
        self._passed.set()


_ids = itertools.count(1)
_Item = tuple[Callable[[], None], tuple[Touchable, ...]]


class QueueStream(Stream):
    """A stream in software: work runs in order, on the calling thread when nothing is ahead of it, else on a worker.

    The worker thread lives only while there is queued work, so an idle stream costs no thread and a stream that was
    forgotten costs nothing. An error of work that ran on the calling thread is raised there; an error of queued work
    waits for ``synchronize``.
    """

    __slots__ = ("__weakref__", "_closed", "_error", "_lock", "_passed", "_queue", "_worker", "device", "pending",
                 "stream_id")  # fmt: skip

    pending: int

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream_id = next(_ids)
        self.pending = 0
        self._lock = threading.RLock()
        self._passed = threading.Condition(self._lock)
        self._queue: deque[_Item] = deque()
        self._worker: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"QueueStream(id={self.stream_id}, pending={self.pending})"

    def run(self, work: Callable[[], None], touches: tuple[Touchable, ...] = ()) -> None:
        """Do ``work`` in stream order: now, when the stream is idle, otherwise when the stream reaches it."""
        with self._lock:
            self._check_open()
            if self.pending:
                self._enqueue(work, touches)
                return
            for memory in touches:
                memory.check_use()
            work()

    def launch(self, work: Callable[[], None], touches: Iterable[Touchable] = ()) -> None:
        with self._lock:
            self._check_open()
            self._enqueue(work, tuple(touches))

    def record_event(self) -> QueueEvent:
        event = QueueEvent()
        self.run(event.set)
        return event

    def wait_event(self, event: Event) -> None:
        if not event.query():
            self.launch(event.synchronize)

    def synchronize(self) -> None:
        self.drain()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def runs_here(self) -> bool:
        return threading.current_thread() is self._worker

    def drain(self) -> None:
        if self.runs_here():
            raise StateError(f"stream {self.stream_id}: work running on a stream can't wait for that stream")
        with self._lock:
            while self.pending:
                self._passed.wait()

    def close(self) -> None:
        worker = self._worker
        self.drain()
        self._closed = True
        if worker is not None:
            worker.join()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"stream {self.stream_id} is closed")

    def _enqueue(self, work: Callable[[], None], touches: tuple[Touchable, ...]) -> None:
        self._queue.append((work, touches))
        self.pending += 1
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"stream-{self.stream_id}", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._worker = None
                    return
                work, touches = self._queue.popleft()
            try:
                for memory in touches:
                    memory.check_use()
                work()
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
            with self._lock:
                self.pending -= 1
                self._passed.notify_all()
            del work, touches
