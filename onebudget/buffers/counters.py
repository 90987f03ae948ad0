"""Bytes per kind of memory held by buffers of this process."""

from __future__ import annotations

import threading
from collections import deque

from onebudget.buffers.kinds import MemoryKind


class MemoryCounters:
    """Current bytes per kind and the last change. One instance counts for the whole process: ``memory_counters``."""

    __slots__ = ("_bytes", "_deltas", "_lock", "_noted")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(MemoryKind, 0)
        self._deltas = dict.fromkeys(MemoryKind, 0)
        self._noted: deque[tuple[MemoryKind, int]] = deque()

    def add(self, kind: MemoryKind, nbytes: int) -> None:
        """Count ``nbytes`` more of ``kind``; negative when they go."""
        with self._lock:
            self._bytes[kind] += nbytes
            self._deltas[kind] = nbytes

    def note(self, kind: MemoryKind, nbytes: int) -> None:
        """``add`` for finalizers, which must not wait for a lock; counted at the next reading."""
        self._noted.append((kind, nbytes))

    def current(self, kind: MemoryKind) -> int:
        """Bytes of ``kind`` held now."""
        self._settle()
        return self._bytes[kind]

    def delta(self, kind: MemoryKind) -> int:
        """The last change of ``kind``, signed."""
        return self._deltas[kind]

    def snapshot(self) -> dict[MemoryKind, int]:
        self._settle()
        with self._lock:
            return dict(self._bytes)

    def _settle(self) -> None:
        while self._noted:
            self.add(*self._noted.popleft())


memory_counters = MemoryCounters()
