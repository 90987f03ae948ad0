"""Buffers: memory asked from a device or the host, typed, owned and freed in stream order."""

from __future__ import annotations

from onebudget.buffers.buffer import Buffer
from onebudget.buffers.counters import MemoryCounters, memory_counters
from onebudget.buffers.kinds import MemoryKind
from onebudget.buffers.manager import BufferManager
from onebudget.buffers.virtual import (
    RestoreMode,
    materialize_with_tag,
    maybe_virtual_memory_scope,
    preserve_contents,
    release_with_tag,
    virtual_memory_manager,
    virtual_memory_scope,
)

__all__ = [
    "Buffer", "BufferManager", "MemoryCounters", "MemoryKind", "RestoreMode", "materialize_with_tag",
    "maybe_virtual_memory_scope", "memory_counters", "preserve_contents", "release_with_tag", "virtual_memory_manager",
    "virtual_memory_scope",
]  # fmt: skip
