"""Page-locked memory that is kept for the next request, because locking pages is slow."""

from __future__ import annotations

import threading

from onebudget.device.allocators import Allocation, Allocator
from onebudget.device.base import Device
from onebudget.device.sample import PoolStats
from onebudget.device.streams import Stream
from onebudget.units import align_up


class PinnedPool(Allocator):
    """Freed blocks are reused by requests of the same number of pages and given back by ``trim``."""

    kind = "pinned_pool"

    def __init__(self, device: Device) -> None:
        self.device = device
        self._idle: dict[int, list[Allocation]] = {}
        self._lock = threading.Lock()
        self._reserved = 0
        self._used = 0
        self._closed = False

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(self._reserved, self._used, self._reserved - self._used)

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        size = align_up(nbytes, self.device.facts.os_page_bytes)
        with self._lock:
            blocks = self._idle.get(size)
            block = blocks.pop() if blocks else None
            self._used += size
        if block is None:
            block = self._allocate_block(size, owner)
        return Allocation(block.address, size, owner, block.memory, block)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        allocation.begin_free()
        allocation.freed = True
        block = allocation.detail
        assert isinstance(block, Allocation)
        with self._lock:
            self._used -= allocation.nbytes
            self._idle.setdefault(allocation.nbytes, []).append(block)
        if self._closed:
            self.trim()

    def trim(self) -> None:
        """Give all idle blocks back."""
        with self._lock:
            blocks = [block for same_size in self._idle.values() for block in same_size]
            self._idle.clear()
            self._reserved -= sum(block.nbytes for block in blocks)
        for block in blocks:
            self.device.pinned.deallocate(block, None)

    def close(self) -> None:
        """Give idle blocks back now, and every other one as soon as it is freed."""
        self._closed = True
        self.trim()

    def _allocate_block(self, size: int, owner: str) -> Allocation:
        try:
            block = self._fresh_block(size, owner)
        except BaseException:
            with self._lock:
                self._used -= size
            raise
        with self._lock:
            self._reserved += size
        return block

    def _fresh_block(self, size: int, owner: str) -> Allocation:
        if size > self.device.host_free_bytes():
            self.trim()
        return self.device.pinned.allocate(size, None, owner)
