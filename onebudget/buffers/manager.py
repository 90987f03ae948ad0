"""The one place that asks a device for raw memory: how, and on which stream; never whether."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Self

from onebudget.buffers.buffer import Buffer, parse_shape
from onebudget.buffers.dtypes import element_type
from onebudget.buffers.kinds import MemoryKind
from onebudget.device.allocators import Allocator, Pool
from onebudget.device.sample import PoolStats
from onebudget.device.streams import Stream
from onebudget.errors import ConfigError, StateError

log = logging.getLogger(__name__)

Size = int | Sequence[int]


class BufferManager:
    """Makes buffers on the device of ``stream``; frees are ordered on that stream.

    ``trim_pool`` gives the pool's idle memory back on ``close`` (for owners of large, long-idle blocks). ``owner`` is
    the label under which bytes are counted when a call names none. ``pool`` replaces the device's primary pool, for
    instance by a wrapper with a limit. Not thread-safe by itself: one per thread and stream.
    """

    def __init__(
        self, stream: Stream, trim_pool: bool = False, *, owner: str = "buffers", pool: Pool | None = None
    ) -> None:
        if not isinstance(stream, Stream):
            raise StateError(f"undefined stream: a BufferManager needs the stream of its buffers, got {stream!r}")
        self.stream = stream
        self.device = stream.device
        self.device.check_open()
        self.trim_pool = trim_pool
        self.owner = owner
        self._pool = self.device.primary_pool() if pool is None else pool
        self._device_source: Allocator = self._pool or self.device.blocking
        self._closed = False
        log.info("buffer manager of %s on stream %s of %s", owner, stream.stream_id, self.device.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def gpu(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Device memory: virtual where a scope is active, else stream-ordered from the pool, else blocking."""
        return self._make(MemoryKind.GPU, self._device_source, size, dtype, owner)

    def gpu_sync(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Device memory that is there at once and outside the pool; virtual where a scope is active."""
        return self._make(MemoryKind.GPU, self.device.blocking, size, dtype, owner)

    def cpu(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Pageable host memory. Asynchronous copies to or from it are not asynchronous."""
        return self._make(MemoryKind.CPU, self.device.cpu, size, dtype, owner)

    def pinned(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Page-locked host memory, for staging."""
        return self._make(MemoryKind.PINNED, self.device.pinned, size, dtype, owner)

    def managed(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Unified memory, migrated by the driver; charged to the card."""
        return self._make(MemoryKind.MANAGED, self.device.managed, size, dtype, owner)

    def pool_stats(self, sync: bool = False) -> PoolStats:
        """Reserved, used and idle bytes of the pool; zeros without one. ``sync`` waits for the stream first.

        Without ``sync``, bytes whose free is still on its way down the stream count as used.
        """
        if sync:
            self.stream.synchronize()
        return self._pool.stats() if self._pool is not None else PoolStats(0, 0, 0)

    def pool_trim_to(self, nbytes: int) -> None:
        """Ask the pool to keep no more than ``nbytes``: a hint; used memory stays. No-op without a pool."""
        if nbytes < 0:
            raise ConfigError.for_field("nbytes", nbytes, "zero or more")
        if self._pool is None:
            log.debug("no pool on %s: nothing to trim", self.device.name)
        else:
            self._pool.trim_to(nbytes)

    def close(self) -> None:
        """Refuse new buffers from now on, and trim the pool where asked to. Buffers already made stay valid."""
        if self._closed:
            return
        self._closed = True
        if self.trim_pool and not self.device.closed:
            self.stream.drain()
            self.pool_trim_to(0)

    def _make(self, kind: MemoryKind, source: Allocator, size: Size, dtype: Any, owner: str | None) -> Buffer:
        if self._closed:
            raise StateError(f"the buffer manager of {self.owner} is closed")
        shape, count = ((size,), size) if type(size) is int and size >= 0 else parse_shape(size)
        name, itemsize = element_type(dtype)
        stream = self.stream if source.stream_ordered else None
        return Buffer(self.device, kind, source, stream, owner or self.owner, shape, count, name, itemsize)
