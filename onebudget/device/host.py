"""A card made of this machine's memory: real bytes, a declared capacity, the semantics of a GPU."""

from __future__ import annotations

import ctypes
import logging
import platform
from typing import TYPE_CHECKING

from onebudget.device import libc
from onebudget.device.facts import DeviceFacts, read_host_facts
from onebudget.device.host_memory import HostArena, HostBlock, PhysicalFile, reserve_addresses
from onebudget.device.host_multicast import HostMulticast
from onebudget.device.multicast import Multicast
from onebudget.device.software import SoftwareDevice
from onebudget.device.tensors import host_tensor
from onebudget.device.vmm import VirtualMemory
from onebudget.errors import ConfigError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

POISON = 0xDD


class HostDevice(SoftwareDevice):
    """``open_device("host", capacity_bytes=...)``.

    ``granularity_bytes`` is the unit of physical memory, one OS page by default so that rounding costs no capacity.
    ``others_bytes`` pretends that other processes hold memory. ``poison`` fills physical memory that comes up
    without contents with 0xDD, to catch readers of undefined bytes. ``pool_supported=False`` and
    ``vmm_supported=False`` act out cards without these.
    """

    kind = "host"
    host_addressable = True

    def __init__(
        self,
        capacity_bytes: int,
        *,
        granularity_bytes: int | None = None,
        others_bytes: int = 0,
        pool_supported: bool = True,
        vmm_supported: bool = True,
        poison: bool = False,
        name: str | None = None,
    ) -> None:
        facts = host_device_facts(capacity_bytes, granularity_bytes, pool_supported, vmm_supported, name)
        super().__init__(facts, torch_device="cpu", others_bytes=others_bytes)
        self.poison = POISON if poison else None
        self.file = PhysicalFile("host")
        self._warned_unlocked = False
        available = facts.host_available_bytes
        if available is not None and capacity_bytes > available:
            log.warning(
                "host device of %s on a machine with %s available: using all of it will swap or kill the process",
                format_bytes(capacity_bytes), format_bytes(available),
            )  # fmt: skip

    def resident_bytes(self) -> int:
        """Pages of device memory that were touched and exist; at most the physical bytes the books show."""
        return self.file.resident_bytes()

    def make_arena(self, nbytes: int) -> HostArena:
        return HostArena(self.file, nbytes, self.facts.granularity_bytes)

    def _create_vmm(self) -> VirtualMemory:
        return HostVirtualMemory(self)

    def _allocate_blocking(self, nbytes: int, kind: str) -> tuple[int, object]:
        arena = self.make_arena(nbytes)
        return arena.address, arena

    def _free_blocking(self, address: int, nbytes: int, memory: object) -> None:
        assert isinstance(memory, HostArena)
        memory.close()

    def _allocate_host(self, nbytes: int, kind: str) -> tuple[int, object]:
        block = HostBlock(nbytes, lock=kind == "pinned")
        if kind == "pinned" and not block.locked and not self._warned_unlocked:
            self._warned_unlocked = True
            limit = self.facts.memlock_limit_bytes
            log.warning(
                "pinned memory is not locked: %s requested, the limit of this process (ulimit -l) is %s. "
                "It works, but the kernel may page it out.",
                format_bytes(nbytes), "unlimited" if limit is None else format_bytes(limit),
            )  # fmt: skip
        return block.address, block

    def _free_host(self, address: int, nbytes: int, memory: object, kind: str) -> None:
        assert isinstance(memory, HostBlock)
        if memory.locked:
            libc.munlock(memory.address, memory.nbytes)

    def _make_multicast(self) -> Multicast:
        return HostMulticast()

    def _host_limit_bytes(self) -> int:
        return self.facts.host_total_bytes or 2**47

    def _tensor(self, address: int, dtype: str, shape: tuple[int, ...], nbytes: int, kind: str,
                keep: object) -> Tensor:  # fmt: skip
        return host_tensor(address, dtype, shape, nbytes, keep)

    def _copy_now(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def _fill_now(self, address: int, value: int, nbytes: int) -> None:
        ctypes.memset(address, value, nbytes)

    def _close(self) -> None:
        super()._close()
        self.file.close()


class HostVirtualMemory(VirtualMemory):
    """Reservations are inaccessible mappings, handles are ranges of the memory file (offset + 1, so never zero)."""

    device: HostDevice

    def _reserve(self, nbytes: int, alignment: int) -> int:
        return reserve_addresses(nbytes, alignment)

    def _free_address(self, address: int, nbytes: int) -> None:
        libc.munmap(address, nbytes)

    def _create(self, nbytes: int) -> int:
        return self.device.file.take(nbytes) + 1

    def _release(self, handle: int, nbytes: int) -> None:
        self.device.file.punch(handle - 1, nbytes)

    def _map(self, address: int, nbytes: int, handle: int) -> None:
        self.device.file.map(handle - 1, nbytes, address=address, protection=libc.PROT_NONE)

    def _set_access(self, address: int, nbytes: int) -> None:
        libc.mprotect(address, nbytes, libc.PROT_READ_WRITE)

    def _unmap(self, address: int, nbytes: int, handle: int) -> None:
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE | libc.MAP_FIXED
        libc.mmap(address, nbytes, libc.PROT_NONE, flags)


def host_device_facts(
    capacity_bytes: int, granularity_bytes: int | None, pool_supported: bool, vmm_supported: bool, name: str | None
) -> DeviceFacts:
    host = read_host_facts()
    page = host.os_page_bytes
    if granularity_bytes is not None and (granularity_bytes <= 0 or granularity_bytes % page):
        raise ConfigError.for_field("granularity_bytes", granularity_bytes, f"a multiple of the OS page, {page} B")
    return DeviceFacts(
        name=name or f"host ({platform.machine()})",
        total_bytes=capacity_bytes,
        granularity_bytes=granularity_bytes or host.os_page_bytes,
        pool_supported=pool_supported,
        vmm_supported=vmm_supported,
        multicast_supported=True,
        unified=True,
        **host.as_device_fields(),
        sources={
            **host.sources(),
            "total_bytes": "capacity_bytes given to open_device",
            "granularity_bytes": "given to open_device" if granularity_bytes else "sysconf(SC_PAGE_SIZE)",
            "pool_supported": "host device", "vmm_supported": "host device",
            "multicast_supported": "shared memory of this machine", "unified": "host device", "mig": "host device",
        },
    )  # fmt: skip
