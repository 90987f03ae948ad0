"""Virtual device memory: sleep and wake by tag, at stable addresses."""

from __future__ import annotations

from onebudget.buffers.virtual.allocator import VirtualAllocator
from onebudget.buffers.virtual.chunk import Chunk, ChunkStatus
from onebudget.buffers.virtual.config import ConfigStack, VirtualConfig, config_stack
from onebudget.buffers.virtual.manager import VirtualMemoryManager, virtual_memory_manager
from onebudget.buffers.virtual.restore import RestoreMode
from onebudget.buffers.virtual.scope import (
    materialize_with_tag,
    maybe_virtual_memory_scope,
    preserve_contents,
    release_with_tag,
    virtual_memory_scope,
)

__all__ = [
    "Chunk", "ChunkStatus", "ConfigStack", "RestoreMode", "VirtualAllocator", "VirtualConfig", "VirtualMemoryManager",
    "config_stack", "materialize_with_tag", "maybe_virtual_memory_scope", "preserve_contents", "release_with_tag",
    "virtual_memory_manager", "virtual_memory_scope",
]  # fmt: skip
