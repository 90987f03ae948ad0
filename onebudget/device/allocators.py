"""What every source of memory looks like: allocate, and free in stream order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from onebudget.device.sample import PoolStats, round_to_sector
from onebudget.errors import AllocationError, UseAfterFreeError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.device.base import Device
    from onebudget.device.streams import Stream


class Allocation:
    """Bytes handed out by an allocator.

    ``nbytes`` is what was handed out (requests rounded up); ``memory`` an object that keeps the address range mapped
    while anything refers to it, be it a tensor made from the bytes or queued work that touches them. ``free_issued``
    turns true when the free is asked for, ``freed`` when it takes effect: in between the stream still has work to do
    that may use the bytes.
    """

    __slots__ = ("address", "detail", "free_issued", "freed", "memory", "nbytes", "owner", "requested_bytes")

    def __init__(
        self,
        address: int,
        nbytes: int,
        owner: str,
        memory: object = None,
        detail: object = None,
        requested_bytes: int = 0,
    ) -> None:
        self.address = address
        self.requested_bytes = requested_bytes
        self.nbytes = nbytes
        self.owner = owner
        self.memory = memory
        self.detail = detail
        self.free_issued = False
        self.freed = False

    def __repr__(self) -> str:
        state = "freed" if self.freed else "free issued" if self.free_issued else "live"
        return f"Allocation({self.address:#x}, {self.nbytes} B, {self.owner!r}, {state})"

    def check_use(self) -> None:
        """Raise ``UseAfterFreeError`` once the free took effect."""
        if self.freed:
            raise UseAfterFreeError(
                f"{format_bytes(self.nbytes)} of {self.owner!r} at {self.address:#x} were freed before this work ran. "
                "Work on another stream needs buffer.record_use(stream) or an event before the free."
            )

    def begin_free(self) -> None:
        if self.free_issued:
            raise UseAfterFreeError(f"double free: {format_bytes(self.nbytes)} of {self.owner!r} at {self.address:#x}")
        self.free_issued = True


class Allocator(ABC):
    """A source of memory. Wrappers are allocators too, so caps, statistics and faults stack."""

    kind: str
    stream_ordered: ClassVar[bool] = False
    counted_by_kind: ClassVar[bool] = False
    """Does it keep the process's counters per kind itself?"""
    counted_by_account: ClassVar[bool] = False
    """Does it count the bytes it was asked for in the device's books, where those counters read them?"""

    @abstractmethod
    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        """``nbytes`` > 0 for ``owner``; ``AllocationError`` when they can't be had, and then nothing changed."""

    @abstractmethod
    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        """Give back. A stream-ordered allocator lets the free take effect when ``stream`` reaches it."""


class Pool(Allocator):
    """Stream-ordered device memory that keeps freed bytes reserved until it is trimmed."""

    stream_ordered: ClassVar[bool] = True
    counted_by_account: ClassVar[bool] = True

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Physical bytes held. Never waits for a stream."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes handed out, including those whose free was asked for but not reached yet."""

    def free_bytes(self) -> int:
        return self.stats().free

    def stats(self) -> PoolStats:
        reserved, used = self.reserved_bytes(), self.used_bytes()
        return PoolStats(reserved=reserved, used=used, free=reserved - used)

    @abstractmethod
    def trim_to(self, nbytes: int) -> None:
        """Give idle physical memory back, as a hint.

        Afterwards ``reserved`` is anything from ``min(reserved before, nbytes)`` up; used memory is never touched.
        """


class BlockingAllocator(Allocator):
    """Device memory taken and given back at once, outside the pool. ``managed`` memory is the same with a driver
    that migrates it, and is charged to the card as well."""

    def __init__(self, device: Device, kind: str = "gpu") -> None:
        self.device = device
        self.kind = kind

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        device = self.device
        physical = device.charge_blocking(nbytes, owner=owner, kind=self.kind)
        try:
            device.faults.check("blocking")
            address, memory = device._allocate_blocking(physical, self.kind)
        except BaseException:
            device.account.refund_blocking(physical)
            raise
        device.account.hand_out(round_to_sector(nbytes), owner)
        return Allocation(address, round_to_sector(nbytes), owner, memory, physical)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        allocation.begin_free()
        device, physical = self.device, allocation.detail
        assert isinstance(physical, int)
        allocation.freed = True
        if device.closed:
            return
        device._free_blocking(allocation.address, physical, allocation.memory)
        device.account.take_back(allocation.nbytes, allocation.owner)
        device.account.refund_blocking(physical)


class HostAllocator(Allocator):
    """Host memory, ``cpu`` (pageable) or ``pinned`` (page-locked). Not charged to the card."""

    def __init__(self, device: Device, kind: str) -> None:
        self.device = device
        self.kind = kind

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        device = self.device
        device.check_open()
        device.collect()
        if nbytes > device.host_free_bytes():
            raise AllocationError(nbytes, device.host_free_bytes(), kind=self.kind, owner=owner)
        device.faults.check("host")
        address, memory = device._allocate_host(nbytes, self.kind)
        device.count_host(nbytes)
        return Allocation(address, nbytes, owner, memory)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        allocation.begin_free()
        allocation.freed = True
        self.device._free_host(allocation.address, allocation.nbytes, allocation.memory, self.kind)
        self.device.count_host(-allocation.nbytes)
