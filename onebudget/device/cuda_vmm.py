"""Virtual memory of the CUDA driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onebudget.device.cuda_driver import CudaContext, twice
from onebudget.device.vmm import VirtualMemory

if TYPE_CHECKING:
    from onebudget.device.base import Device


class CudaVirtualMemory(VirtualMemory):
    """The driver's calls one to one; the checks and the books are the contract's.

    Before memory is unmapped, ``drain_streams`` of the device has waited for everything in its context.
    """

    def __init__(self, device: Device, context: CudaContext) -> None:
        super().__init__(device)
        self._context = context
        self._properties = memory_properties(context.driver.api, device.index)

    def create(self, nbytes: int, *, owner: str, live_bytes: int | None = None, tag: str | None = None) -> int:
        create = super().create
        return twice(
            lambda: create(nbytes, owner=owner, live_bytes=live_bytes, tag=tag),
            self.device.reclaim,
            lambda: self.device.out_of_memory(nbytes, owner=owner, tag=tag),
        )

    def _reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._context.call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def _free_address(self, address: int, nbytes: int) -> None:
        self._context.call("cuMemAddressFree", address, nbytes)

    def _create(self, nbytes: int) -> int:
        return int(self._context.call("cuMemCreate", nbytes, self._properties, 0))

    def _release(self, handle: int, nbytes: int) -> None:
        self._context.call("cuMemRelease", handle)

    def _map(self, address: int, nbytes: int, handle: int) -> None:
        self._context.call("cuMemMap", address, nbytes, 0, handle, 0)

    def _set_access(self, address: int, nbytes: int) -> None:
        api = self._context.driver.api
        access = api.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._context.call("cuMemSetAccess", address, nbytes, [access], 1)

    def _unmap(self, address: int, nbytes: int, handle: int) -> None:
        self._context.call("cuMemUnmap", address, nbytes)


def memory_properties(api: Any, index: int) -> Any:
    """Device memory, pinned to its place, that no other process can import."""
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties
