"""Virtual memory: reserve addresses, create physical memory, map one onto the other, and take it away again.

The contract all devices keep:

* a reservation is address space only; touching it before a mapping with access exists is an error of the platform;
* a handle is physical memory only, charged to the card from ``create`` to ``release``;
* a mapping joins one whole handle to one place in a reservation; ``set_access`` makes it readable and writable;
* none of this is ordered on a stream: ``unmap`` waits for everything submitted to the device's streams;
* order of undoing: unmap, release the handle, free the address. Anything else is a ``StateError``.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError, StateError

if TYPE_CHECKING:
    from onebudget.device.base import Device


@dataclass(frozen=True, slots=True)
class VirtualCounts:
    """How many of each exist, and the physical bytes behind the handles."""

    reservations: int
    handles: int
    mappings: int
    handle_bytes: int


@dataclass(slots=True)
class _Handle:
    nbytes: int
    live_bytes: int
    owner: str
    mapped_at: int = 0


@dataclass(slots=True)
class _Reservation:
    start: int
    nbytes: int
    mappings: dict[int, int] = field(default_factory=dict)
    """Size by address of everything mapped inside."""


class VirtualMemory(ABC):
    """Public methods check and keep the books; hooks do the platform's act."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._reservations: dict[int, _Reservation] = {}
        self._handles: dict[int, _Handle] = {}
        self._mappings: dict[int, tuple[int, int]] = {}
        self._alignment: int | None = None

    @property
    def alignment_bytes(self) -> int:
        """Least common multiple of the OS page and the device's granule: sizes and addresses are multiples of it."""
        facts = self.device.facts
        if self._alignment is None:
            self._alignment = math.lcm(facts.os_page_bytes, facts.granularity_bytes)
        return self._alignment

    def counts(self) -> VirtualCounts:
        with self._lock:
            physical = sum(handle.nbytes for handle in self._handles.values())
            return VirtualCounts(len(self._reservations), len(self._handles), len(self._mappings), physical)

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` of addresses and return the first. No physical memory, no charge."""
        self._check_size(nbytes)
        self.device.check_open()
        self.device.faults.check("reserve")
        address = self._reserve(nbytes, self.alignment_bytes)
        with self._lock:
            self._reservations[address] = _Reservation(address, nbytes)
        return address

    def free_address(self, address: int) -> None:
        """Give a reservation back; everything in it must be unmapped."""
        with self._lock:
            reservation = self._reservations.get(address)
            if reservation is None:
                raise StateError(f"{address:#x} is not a reserved address")
            if reservation.mappings:
                raise StateError(f"reservation {address:#x} still has {len(reservation.mappings)} mappings")
            del self._reservations[address]  # first: once it is free, another thread may be given the same address
        try:
            self.device.faults.check("free_address")
            self._free_address(address, reservation.nbytes)
        except BaseException:
            with self._lock:
                self._reservations[address] = reservation
            raise

    def create(self, nbytes: int, *, owner: str, live_bytes: int | None = None, tag: str | None = None) -> int:
        """Physical memory of ``nbytes``, charged to the card; ``live_bytes`` of them count as handed out to ``owner``.

        Gives idle pool memory back before it raises ``AllocationError``.
        """
        self._check_size(nbytes)
        device, account = self.device, self.device.account
        device.check_open()
        device.collect()
        if not account.try_charge_mapped(nbytes):
            device.reclaim()
            if not account.try_charge_mapped(nbytes):
                raise device.out_of_memory(nbytes, owner=owner, tag=tag)
        try:
            device.faults.check("create")
            handle = self._create(nbytes)
        except BaseException:
            account.refund_mapped(nbytes)
            raise
        record = _Handle(nbytes, nbytes if live_bytes is None else live_bytes, owner)
        account.hand_out(record.live_bytes, owner)
        with self._lock:
            self._handles[handle] = record
        return handle

    def release(self, handle: int) -> None:
        """Give physical memory back. It must not be mapped."""
        with self._lock:
            record = self._handle(handle)
            if record.mapped_at:
                raise StateError(f"handle {handle} is still mapped at {record.mapped_at:#x}")
            del self._handles[handle]
        try:
            self.device.faults.check("release")
            self._release(handle, record.nbytes)
        except BaseException:
            with self._lock:
                self._handles[handle] = record
            raise
        self.device.account.take_back(record.live_bytes, record.owner)
        self.device.account.refund_mapped(record.nbytes)

    def map(self, address: int, handle: int) -> None:
        """Put the whole handle at ``address``, inside a reservation and over no other mapping. No access yet."""
        with self._lock:
            record = self._handle(handle)
            nbytes = record.nbytes
            if record.mapped_at:
                raise StateError(f"handle {handle} is already mapped at {record.mapped_at:#x}")
            reservation = self._find_place(address, nbytes)
        self.device.faults.check("map")
        self._map(address, nbytes, handle)
        with self._lock:
            self._mappings[address] = (handle, nbytes)
            reservation.mappings[address] = nbytes
            record.mapped_at = address

    def set_access(self, address: int) -> None:
        """Make the mapping at ``address`` readable and writable."""
        with self._lock:
            _, nbytes = self._mapping(address)
        self.device.faults.check("access")
        self._set_access(address, nbytes)

    def unmap(self, address: int) -> None:
        """Take the mapping at ``address`` away; the range stays reserved and must not be touched."""
        with self._lock:
            handle, nbytes = self._mapping(address)
        self.device.drain_streams()
        self.device.faults.check("unmap")
        self._unmap(address, nbytes, handle)
        with self._lock:
            del self._mappings[address]
            self._handles[handle].mapped_at = 0
            del self._find(address).mappings[address]

    def close(self) -> None:
        """Undo everything that is left, for a device that closes."""
        for address in list(self._mappings):
            self.unmap(address)
        for handle in list(self._handles):
            self.release(handle)
        for address in list(self._reservations):
            self.free_address(address)

    def _handle(self, handle: int) -> _Handle:
        record = self._handles.get(handle)
        if record is None:
            raise StateError(f"{handle} is not a live physical handle")
        return record

    def _mapping(self, address: int) -> tuple[int, int]:
        mapping = self._mappings.get(address)
        if mapping is None:
            raise StateError(f"nothing is mapped at {address:#x}")
        return mapping

    def _check_size(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self.alignment_bytes:
            raise ConfigError.for_field("nbytes", nbytes, f"a positive multiple of {self.alignment_bytes}")

    def _find(self, address: int) -> _Reservation:
        exact = self._reservations.get(address)
        if exact is not None:
            return exact
        for start, reservation in self._reservations.items():
            if start <= address < start + reservation.nbytes:
                return reservation
        raise StateError(f"{address:#x} is not inside a reservation")

    def _find_place(self, address: int, nbytes: int) -> _Reservation:
        reservation = self._find(address)
        if address + nbytes > reservation.start + reservation.nbytes:
            raise StateError(f"{nbytes} B at {address:#x} reach beyond the reservation at {reservation.start:#x}")
        clash = [a for a, size in reservation.mappings.items() if a < address + nbytes and address < a + size]
        if clash:
            raise StateError(f"{nbytes} B at {address:#x} overlap the mapping at {clash[0]:#x}")
        return reservation

    @abstractmethod
    def _reserve(self, nbytes: int, alignment: int) -> int: ...

    @abstractmethod
    def _free_address(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def _create(self, nbytes: int) -> int:
        """A new non-zero handle."""

    @abstractmethod
    def _release(self, handle: int, nbytes: int) -> None: ...

    @abstractmethod
    def _map(self, address: int, nbytes: int, handle: int) -> None: ...

    @abstractmethod
    def _set_access(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def _unmap(self, address: int, nbytes: int, handle: int) -> None: ...
