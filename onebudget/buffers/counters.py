"""Bytes per kind of memory held by buffers of this process."""

from __future__ import annotations

import threading

from onebudget.buffers.kinds import MemoryKind


class MemoryCounters:
    """Current bytes per kind and the last change. One instance counts for the whole process: ``memory_counters``."""

    __slots__ = ("_bytes", "_deltas", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(MemoryKind, 0)
        self._deltas = dict.fromkeys(MemoryKind, 0)

    def add(self, kind: MemoryKind, nbytes: int) -> None:
        """Count ``nbytes`` more of ``kind``; negative when they go."""
        with self._lock:
            self._bytes[kind] += nbytes
            self._deltas[kind] = nbytes

    def current(self, kind: MemoryKind) -> int:
        """Bytes of ``kind`` held now."""
        return self._bytes[kind]

    def delta(self, kind: MemoryKind) -> int:
        """The last change of ``kind``, signed."""
        return self._deltas[kind]

    def snapshot(self) -> dict[MemoryKind, int]:
        with self._lock:
            return dict(self._bytes)


memory_counters = MemoryCounters()
