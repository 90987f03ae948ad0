"""The one place that asks a device for raw memory: how, and on which stream; never whether."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from onebudget.buffers.agreement import RankGroup
from onebudget.buffers.buffer import Buffer, parse_shape
from onebudget.buffers.counters import memory_counters
from onebudget.buffers.dtypes import element_type
from onebudget.buffers.kinds import MemoryKind
from onebudget.buffers.nvls import NvlsAllocator, agree_on_request
from onebudget.buffers.pinned_pool import PinnedPool
from onebudget.buffers.transfer import HostData, copy_buffer, copy_from_host, fill_buffer
from onebudget.buffers.virtual.allocator import VirtualAllocator
from onebudget.buffers.virtual.config import BACKGROUND, VirtualConfig, config_stack
from onebudget.buffers.virtual.elastic import ELASTIC_TAG, ElasticAllocator, ElasticBuffer
from onebudget.device.allocators import Allocator, Pool
from onebudget.device.sample import PoolStats
from onebudget.device.streams import Stream
from onebudget.errors import ConfigError, DeviceError, StateError

log = logging.getLogger(__name__)

Size = int | Sequence[int]
_GPU = MemoryKind.GPU  # members of an enumeration are slow to look up


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
        self._pinned_pool = PinnedPool(self.device)
        memory_counters.watch(self.device.account)
        self._closed = False
        log.info("buffer manager of %s on stream %s of %s", owner, stream.stream_id, self.device.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self.device.closed:
            return
        # A finalizer may run inside any locked section, so the device does this when it next looks.
        self.device.orphans.append(self._pinned_pool.close)
        if self.trim_pool and self._pool is not None:
            self.device.orphans.append(partial(self._pool.trim_to, 0))

    def gpu(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Device memory: virtual where a scope is active, else stream-ordered from the pool, else blocking."""
        config = config_stack.current
        source = self._device_source if config is BACKGROUND else self._virtual_source(config)
        return self._make(_GPU, source, size, dtype, owner)

    def gpu_sync(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Device memory that is there at once and outside the pool; virtual where a scope is active."""
        config = config_stack.current
        source = self._virtual_source(config) if config else self.device.blocking
        return self._make(MemoryKind.GPU, source, size, dtype, owner)

    def elastic(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> ElasticBuffer:
        """Addresses of device memory; what lies behind them comes and goes by pieces, with the scope's tag where one is
        active. ``DeviceError`` where the device has no virtual memory."""
        self._check_open()
        shape, count = parse_shape(size)
        source = ElasticAllocator(self.device, config_stack.current or VirtualConfig(ELASTIC_TAG), self.stream)
        return ElasticBuffer(source, owner or self.owner, shape, count, element_type(dtype))

    def cpu(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Pageable host memory. Asynchronous copies to or from it are not asynchronous."""
        return self._make(MemoryKind.CPU, self.device.cpu, size, dtype, owner)

    def pinned(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Page-locked host memory, for staging."""
        return self._make(MemoryKind.PINNED, self.device.pinned, size, dtype, owner)

    def pinned_pool(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Page-locked host memory from a pool of this manager that keeps it for reuse until ``close``."""
        return self._make(MemoryKind.PINNED_POOL, self._pinned_pool, size, dtype, owner)

    def managed(self, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Unified memory, migrated by the driver; charged to the card."""
        return self._make(MemoryKind.MANAGED, self.device.managed, size, dtype, owner)

    def ipc_nvls(self, ranks: Iterable[int], shape: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """Zeroed memory at the same address on every rank of ``ranks``; what one writes the others read.

        Every listed rank calls this with equal arguments, in the same order as its other collective calls; otherwise
        all of them raise ``AgreementError``. ``DeviceError`` where the device can't share memory.
        """
        self._check_open()
        if not self.device.facts.multicast_supported:
            raise DeviceError(f"{self.device.name} has no multicast memory", call="ipc_nvls")
        group = RankGroup(ranks)
        agree_on_request(group, shape, dtype)
        return self._make(MemoryKind.NVLS, NvlsAllocator(self.device, group), shape, dtype, owner)

    def allocate(self, kind: MemoryKind | str, size: Size, dtype: Any = "uint8", *, owner: str | None = None) -> Buffer:
        """A buffer of ``kind``. Not for ``nvls``, which several processes must ask for together (``ipc_nvls``)."""
        kind = MemoryKind.parse(kind)
        if kind is MemoryKind.NVLS:
            raise ConfigError.for_field("kind", kind.value, "a kind one process can allocate alone; see ipc_nvls()")
        make: Callable[..., Buffer] = getattr(self, kind.value)
        return make(size, dtype, owner=owner)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy between buffers of equal dtype and size: at once between host buffers, else on this stream."""
        self._check_open()
        copy_buffer(source, target, self.stream)

    def copy_from(self, source: Any, kind: MemoryKind | str = MemoryKind.GPU, *, owner: str | None = None) -> Buffer:
        """A new buffer of ``kind`` with the contents of a buffer, a NumPy array or a CPU tensor."""
        data = None if isinstance(source, Buffer) else HostData.of(source)
        target = self.allocate(kind, (data or source).shape, (data or source).dtype, owner=owner)
        with ExitStack() as undo:
            undo.callback(target.release)
            if data is None:
                self.copy(source, target)
            else:
                copy_from_host(data, target, self.stream)
            undo.pop_all()
        return target

    def set_zero(self, buffer: Buffer) -> None:
        """Set every byte to zero."""
        self.set_mem(buffer, 0)

    def set_mem(self, buffer: Buffer, value: int) -> None:
        """Set every byte to ``value`` (0..255): at once on the host, else on this stream."""
        self._check_open()
        fill_buffer(buffer, value, self.stream)

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
        self._pinned_pool.close()
        if self.trim_pool and not self.device.closed:
            self.stream.drain()
            self.pool_trim_to(0)

    def _make(self, kind: MemoryKind, source: Allocator, size: Size, dtype: Any, owner: str | None) -> Buffer:
        if self._closed:
            self._check_open()
        shape, count = ((size,), size) if type(size) is int and size >= 0 else parse_shape(size)
        stream = self.stream if source.stream_ordered else None
        return Buffer(self.device, kind, source, stream, owner or self.owner, shape, count, element_type(dtype))

    def _virtual_source(self, config: VirtualConfig) -> VirtualAllocator:
        return VirtualAllocator(self.device, config, self.stream)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"the buffer manager of {self.owner} is closed")
