"""The driver's stream-ordered pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onebudget.device.allocators import Allocation, Pool
from onebudget.device.cuda_driver import LEGACY_STREAM, CudaContext, twice
from onebudget.device.cuda_streams import CudaStream
from onebudget.device.sample import round_to_sector
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.device.base import Device
    from onebudget.device.streams import Stream

KEEP_ALL = 2**64 - 1


class CudaPool(Pool):
    """A pool of its own: neither the device's default pool nor the framework's, so trimming it touches only buffers.

    The release threshold is the highest there is: synchronising gives nothing back, only ``trim_to`` does. ``reserved``
    and ``used`` are the driver's attributes; ``used`` counts a block until the stream reached its free, while the
    device's books take it back when the free is asked for.
    """

    kind = "gpu"

    def __init__(self, device: Device, context: CudaContext) -> None:
        self.device = device
        self._context = context
        self._driver = driver = context.driver
        self._live: dict[int, int] = {}
        """Bytes asked for, by address."""
        self._lock = threading.Lock()
        self._attributes = driver.api.CUmemPool_attribute
        self._handle = context.call("cuMemPoolCreate", pool_properties(driver.api, device.index))
        try:
            self._keep_freed_memory()
        except BaseException:
            context.call("cuMemPoolDestroy", self._handle)
            raise

    def reserved_bytes(self) -> int:
        return self._read(self._attributes.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    def used_bytes(self) -> int:
        return self._read(self._attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        device, size = self.device, round_to_sector(nbytes)
        device.check_open()
        if device.orphans:
            device.collect()
        device.faults.check("pool_grow")
        call, order = self._on(stream)
        address = twice(
            lambda: int(call("cuMemAllocFromPoolAsync", size, self._handle, order)),
            device.reclaim,
            lambda: device.out_of_memory(nbytes, owner=owner),
        )
        with self._lock:
            self._live[address] = nbytes
        account = device.account
        with account.lock:
            account.hand_out_locked(size, owner)
            account.requested_bytes += nbytes
        return Allocation(address, size, owner, requested_bytes=nbytes)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        allocation.begin_free()
        allocation.freed = True
        with self._lock:
            if allocation.address not in self._live:
                return  # the pool was closed, and gave it back then
            del self._live[allocation.address]
        call, order = self._on(stream)
        call("cuMemFreeAsync", allocation.address, order)
        account = self.device.account
        with account.lock:
            account.take_back_locked(allocation.nbytes, allocation.owner)
            account.requested_bytes -= allocation.requested_bytes

    def trim_to(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ConfigError.for_field("nbytes", nbytes, "zero or more")
        self._context.call("cuMemPoolTrimTo", self._handle, nbytes)

    def close(self) -> None:
        """Free what is still handed out and destroy the pool. The device must be idle."""
        with self._lock:
            live, self._live = self._live, {}
        with self.device.account.lock:
            self.device.account.requested_bytes -= sum(live.values())
        for address in live:
            self._context.call("cuMemFree", address)
        self._context.call("cuMemPoolDestroy", self._handle)

    def _keep_freed_memory(self) -> None:
        threshold = self._driver.api.cuuint64_t(KEEP_ALL)
        attribute = self._attributes.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self._context.call("cuMemPoolSetAttribute", self._handle, attribute, threshold)

    def _on(self, stream: Stream | None) -> tuple[Callable[..., Any], Any]:
        """How to call, and the driver's stream. Only the null stream needs a current context; a stream that was closed
        is idle, so the null stream can stand in for it."""
        if isinstance(stream, CudaStream) and not stream.closed:
            return self._driver.call, stream.handle
        return self._context.call, LEGACY_STREAM

    def _read(self, attribute: Any) -> int:
        return int(self._driver.call("cuMemPoolGetAttribute", self._handle, attribute))


def pool_properties(api: Any, index: int) -> Any:
    """Device memory, pinned to its place, that no other process can import."""
    properties = api.CUmemPoolProps()
    properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.handleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties
