"""Wrappers over a pool: cap, statistics, trace, leak report, faults. Each is a pool itself, so they stack.

A wrapper keeps what it wraps alive. Give one to ``BufferManager(stream, pool=...)``. A free counts here when it is
asked for; the pool below counts it when the stream reaches it.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from onebudget.device.allocators import Allocation, Pool
from onebudget.device.sample import PoolStats, round_to_sector
from onebudget.device.streams import Stream
from onebudget.errors import AllocationError, ConfigError


class PoolWrapper(Pool):
    """Passes everything on."""

    def __init__(self, upstream: Pool) -> None:
        self.upstream = upstream
        self.kind = upstream.kind
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        return self.upstream.allocate(nbytes, stream, owner)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        self.upstream.deallocate(allocation, stream)

    def reserved_bytes(self) -> int:
        return self.upstream.reserved_bytes()

    def used_bytes(self) -> int:
        return self.upstream.used_bytes()

    def stats(self) -> PoolStats:
        return self.upstream.stats()

    def trim_to(self, nbytes: int) -> None:
        self.upstream.trim_to(nbytes)


class LimitPool(PoolWrapper):
    """Refuses what would bring the bytes handed out through it above ``limit_bytes``."""

    def __init__(self, upstream: Pool, limit_bytes: int) -> None:
        super().__init__(upstream)
        if limit_bytes < 0:
            raise ConfigError.for_field("limit_bytes", limit_bytes, "zero or more")
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        size = round_to_sector(nbytes)
        with self._lock:
            if self.held_bytes + size > self.limit_bytes:
                detail = f"The limit on this pool is {self.limit_bytes} B."
                raise AllocationError(nbytes, self.limit_bytes - self.held_bytes, owner=owner, detail=detail)
            self.held_bytes += size
        try:
            return super().allocate(nbytes, stream, owner)
        except BaseException:
            self._give_back(size)
            raise

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        super().deallocate(allocation, stream)
        self._give_back(allocation.nbytes)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.held_bytes -= size


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What went through a pool: bytes and calls, now, at the peak, and in total."""

    current_bytes: int = 0
    peak_bytes: int = 0
    total_bytes: int = 0
    current_count: int = 0
    total_count: int = 0
    failed_count: int = 0


class StatisticsPool(PoolWrapper):
    """Counts bytes and calls. ``counts()`` is a snapshot."""

    def __init__(self, upstream: Pool) -> None:
        super().__init__(upstream)
        self._current = self._peak = self._total = 0
        self._live = self._calls = self._failed = 0

    def counts(self) -> PoolCounts:
        with self._lock:
            return PoolCounts(self._current, self._peak, self._total, self._live, self._calls, self._failed)

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        try:
            allocation = super().allocate(nbytes, stream, owner)
        except BaseException:
            with self._lock:
                self._failed += 1
            raise
        with self._lock:
            self._current += allocation.nbytes
            self._total += allocation.nbytes
            self._peak = max(self._peak, self._current)
            self._live += 1
            self._calls += 1
        return allocation

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        super().deallocate(allocation, stream)
        with self._lock:
            self._current -= allocation.nbytes
            self._live -= 1


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One call: ``action`` is "allocate", "free", "trim" or "failed"."""

    number: int
    action: str
    nbytes: int
    owner: str
    address: int = 0
    stream_id: int | None = None


class TracePool(PoolWrapper):
    """Keeps the last ``limit`` calls in order, for tests and for the minutes before a failure."""

    def __init__(self, upstream: Pool, limit: int = 10_000) -> None:
        super().__init__(upstream)
        self._records: deque[TraceRecord] = deque(maxlen=limit)
        self._numbers = itertools.count()

    def records(self) -> list[TraceRecord]:
        return list(self._records)

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        try:
            allocation = super().allocate(nbytes, stream, owner)
        except BaseException:
            self._note("failed", nbytes, owner, 0, stream)
            raise
        self._note("allocate", allocation.nbytes, owner, allocation.address, stream)
        return allocation

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        super().deallocate(allocation, stream)
        self._note("free", allocation.nbytes, allocation.owner, allocation.address, stream)

    def trim_to(self, nbytes: int) -> None:
        super().trim_to(nbytes)
        self._note("trim", nbytes, "", 0, None)

    def _note(self, action: str, nbytes: int, owner: str, address: int, stream: Stream | None) -> None:
        stream_id = None if stream is None else stream.stream_id
        self._records.append(TraceRecord(next(self._numbers), action, nbytes, owner, address, stream_id))


@dataclass(frozen=True, slots=True)
class Leak:
    """An allocation that is still live, and the frames that made it, innermost last."""

    address: int
    nbytes: int
    owner: str
    made_at: tuple[str, ...]


class LeaksPool(PoolWrapper):
    """Knows every live allocation and, with ``frames`` > 0, where it was made. Slow; for looking for leaks."""

    def __init__(self, upstream: Pool, frames: int = 0) -> None:
        super().__init__(upstream)
        self._frames = frames
        self._live: dict[Allocation, tuple[str, ...]] = {}

    def leaks(self) -> list[Leak]:
        """What is live now, largest first."""
        with self._lock:
            live = list(self._live.items())
        found = [Leak(one.address, one.nbytes, one.owner, made_at) for one, made_at in live]
        return sorted(found, key=lambda leak: -leak.nbytes)

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        allocation = super().allocate(nbytes, stream, owner)
        stack = traceback.extract_stack(limit=self._frames + 1)[:-1] if self._frames else ()
        made_at = tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack)
        with self._lock:
            self._live[allocation] = made_at
        return allocation

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        super().deallocate(allocation, stream)
        with self._lock:
            self._live.pop(allocation, None)


class FaultPool(PoolWrapper):
    """Fails the allocations that ``chooses(number, nbytes)`` picks; ``number`` counts from 0."""

    def __init__(self, upstream: Pool, chooses: Callable[[int, int], bool]) -> None:
        super().__init__(upstream)
        self._chooses = chooses
        self._numbers = itertools.count()

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        number = next(self._numbers)
        if self._chooses(number, nbytes):
            raise AllocationError(nbytes, 0, owner=owner, detail=f"Injected into allocation {number}.")
        return super().allocate(nbytes, stream, owner)
