"""A card of any size that holds nothing: the same books, streams and failures, without a byte of contents."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from onebudget.device.facts import DeviceFacts, read_host_facts
from onebudget.device.software import SoftwareDevice
from onebudget.device.tensors import meta_tensor
from onebudget.device.vmm import VirtualMemory
from onebudget.units import align_up

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_ADDRESS = 2**52  # beyond what a process can map, so no fake address is ever a real one
_HOST_BYTES = 2**47
_GIVEN = ("name", "total_bytes", "granularity_bytes", "pool_supported", "vmm_supported", "host_total_bytes")


class _Addresses:
    def __init__(self) -> None:
        self._next = _FIRST_ADDRESS
        self._lock = threading.Lock()

    def take(self, nbytes: int, alignment: int) -> int:
        with self._lock:
            address = align_up(self._next, alignment)
            self._next = address + nbytes
            return address


_addresses = _Addresses()


class FakeArena:
    """Addresses without memory."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def decommit(self, start: int, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class FakeDevice(SoftwareDevice):
    """``open_device("fake", capacity_bytes=..., gpu="H100-SXM-80GB")``: accounting only; tensors are ``meta``.

    Options as on the host device, and ``host_capacity_bytes``, the ceiling of the host kinds of memory.
    """

    kind = "fake"
    has_contents = False

    def __init__(
        self,
        capacity_bytes: int,
        *,
        gpu: str | None = None,
        granularity_bytes: int | None = None,
        others_bytes: int = 0,
        pool_supported: bool = True,
        vmm_supported: bool = True,
        host_capacity_bytes: int = _HOST_BYTES,
    ) -> None:
        page = read_host_facts().os_page_bytes
        facts = DeviceFacts(
            name=gpu or "fake",
            total_bytes=capacity_bytes,
            granularity_bytes=granularity_bytes or page,
            os_page_bytes=page,
            pool_supported=pool_supported,
            vmm_supported=vmm_supported,
            multicast_supported=False,
            host_total_bytes=host_capacity_bytes,
            sources=dict.fromkeys(_GIVEN, "given to open_device"),
        )
        super().__init__(facts, torch_device="meta", others_bytes=others_bytes)
        self._host_capacity_bytes = host_capacity_bytes

    def take_addresses(self, nbytes: int, alignment: int) -> int:
        """Addresses that no fake device of this process handed out before."""
        return _addresses.take(nbytes, alignment)

    def make_arena(self, nbytes: int) -> FakeArena:
        return FakeArena(self.take_addresses(nbytes, self.facts.granularity_bytes), nbytes)

    def _create_vmm(self) -> VirtualMemory:
        return FakeVirtualMemory(self)

    def _allocate_blocking(self, nbytes: int, kind: str) -> tuple[int, object]:
        return self.take_addresses(nbytes, self.facts.granularity_bytes), None

    def _free_blocking(self, address: int, nbytes: int, memory: object) -> None:
        pass

    def _allocate_host(self, nbytes: int, kind: str) -> tuple[int, object]:
        return self.take_addresses(nbytes, self.facts.os_page_bytes), None

    def _free_host(self, address: int, nbytes: int, memory: object, kind: str) -> None:
        pass

    def _host_limit_bytes(self) -> int:
        return self._host_capacity_bytes

    def _tensor(self, address: int, dtype: str, shape: tuple[int, ...], nbytes: int, kind: str,
                keep: object) -> Tensor:  # fmt: skip
        return meta_tensor(dtype, shape, keep)

    def _copy_now(self, target: int, source: int, nbytes: int) -> None:
        pass

    def _fill_now(self, address: int, value: int, nbytes: int) -> None:
        pass


class FakeVirtualMemory(VirtualMemory):
    device: FakeDevice

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self._next_handle = 0

    def _reserve(self, nbytes: int, alignment: int) -> int:
        return self.device.take_addresses(nbytes, alignment)

    def _free_address(self, address: int, nbytes: int) -> None:
        pass

    def _create(self, nbytes: int) -> int:
        with self._lock:
            self._next_handle += 1
            return self._next_handle

    def _release(self, handle: int, nbytes: int) -> None:
        pass

    def _map(self, address: int, nbytes: int, handle: int) -> None:
        pass

    def _set_access(self, address: int, nbytes: int) -> None:
        pass

    def _unmap(self, address: int, nbytes: int, handle: int) -> None:
        pass
