"""Buffers: memory asked from a device or the host, typed, owned and freed in stream order."""

from __future__ import annotations

from onebudget.buffers.buffer import Buffer
from onebudget.buffers.counters import MemoryCounters, memory_counters
from onebudget.buffers.kinds import MemoryKind
from onebudget.buffers.manager import BufferManager

__all__ = ["Buffer", "BufferManager", "MemoryCounters", "MemoryKind", "memory_counters"]
