"""A real CUDA device: memory, streams and facts from the driver, live tensors from torch's allocator.

The machine this was written on has no GPU: its tests run the code against a stand-in for the driver that refuses wrong
orders and counts what is left, and against the real structures of cuda-bindings. What only a GPU can show (that torch
accepts the tensors, that streams order as the driver promises) is in ``tests/gpu``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from onebudget.device.account import TENSOR_OWNER, Account
from onebudget.device.allocators import Allocation, BlockingAllocator, HostAllocator
from onebudget.device.base import Device
from onebudget.device.cuda_driver import LEGACY_STREAM, CudaContext, CudaDriver, find_device, load_driver, twice
from onebudget.device.cuda_facts import Management, Nvml, others_bytes, processes_before, read_cuda_facts
from onebudget.device.cuda_pool import CudaPool
from onebudget.device.cuda_streams import CudaStream
from onebudget.device.cuda_torch import TorchAllocator, cuda_tensor
from onebudget.device.cuda_vmm import CudaVirtualMemory
from onebudget.device.host_memory import HostBlock
from onebudget.device.sample import MemorySample, round_to_sector
from onebudget.device.streams import Stream, Touchable
from onebudget.device.tensors import host_tensor
from onebudget.errors import AllocationError, DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from onebudget.device.allocators import Pool
    from onebudget.device.multicast import Multicast
    from onebudget.device.vmm import VirtualMemory

log = logging.getLogger(__name__)

_PORTABLE = 1
_ATTACH_GLOBAL = 1
_HOST_MEMORY = 1
_HOST_KINDS = ("cpu", "pinned", "pinned_pool")


class CudaDevice(Device):
    """``open_device("cuda:0")``. ``DeviceError`` says what is missing where there is no such device.

    The driver decides what fits; the books here only say who holds what. ``free_bytes`` and ``used_bytes`` are the
    driver's and include other processes. ``sample()``: ``alloc_live`` is torch's live bytes plus the bytes of live
    buffers; ``alloc_peak`` the sum of both high-water marks, an upper bound of the true peak because the two need not
    fall on the same moment. torch's tensors appear under the owner "tensors"; charging them is left to torch, so the
    charge methods do nothing.

    Before a request fails, the device waits for all streams and both pools (torch's and the buffers') give idle memory
    back.
    """

    kind = "cuda"

    def __init__(
        self, index: int = 0, *, driver: CudaDriver | None = None, management: Callable[[], Management] | None = None
    ) -> None:
        driver = driver or load_driver()
        management = management or functools.cache(Nvml)
        handle = find_device(driver, index)
        before = processes_before(driver, handle, management)
        with ExitStack() as undo:
            self.context = CudaContext(driver, handle)
            undo.callback(self.context.close)
            facts = read_cuda_facts(self.context, index, management)
            others = others_bytes(self.context, facts.total_bytes, before, management)
            super().__init__(facts, torch_device=f"cuda:{index}", account=Account(None, others or 0), index=index)
            undo.pop_all()
        self.others_known = others is not None
        self.torch = TorchAllocator(index)
        self.blocking = _CudaBlocking(self)
        self.managed = _CudaBlocking(self, "managed")
        self.pinned = _CudaPinned(self, "pinned")
        self._live_lock = threading.Lock()
        self._live: dict[int, str] = {}

    # readings ---------------------------------------------------------------------------------------------------

    def reset_peak(self) -> None:
        super().reset_peak()
        self.torch.reset_peak()

    def used_by_owner(self) -> dict[str, int]:
        return _with_tensors(super().used_by_owner(), self.torch.live_bytes())

    def peak_by_owner(self) -> dict[str, int]:
        return _with_tensors(super().peak_by_owner(), self.torch.peak_bytes())

    def charge_tensor_bytes(self, nbytes: int, owner: str = TENSOR_OWNER) -> None:
        """Nothing: torch's allocator holds the bytes and counts them."""

    def refund_tensor_bytes(self, nbytes: int, owner: str = TENSOR_OWNER) -> None:
        """Nothing, as above."""

    def _free_bytes(self) -> int:
        return int(self.context.call("cuMemGetInfo")[0])

    def _used_bytes(self) -> int:
        return self.total_bytes - self._free_bytes()

    def _sample(self) -> MemorySample:
        account = self.account
        return MemorySample(
            total=self.total_bytes,
            free=self._free_bytes(),
            alloc_live=self.torch.live_bytes() + account.live_bytes,
            alloc_peak=self.torch.peak_bytes() + account.peak_bytes,
        )

    # physical memory --------------------------------------------------------------------------------------------

    def charge_blocking(self, nbytes: int, *, owner: str, kind: str = "gpu") -> int:
        """``nbytes`` rounded up to 512 B: the driver packs small allocations into its granules itself."""
        self.check_open()
        self.collect()
        size = round_to_sector(nbytes)
        self.account.try_charge_blocking(size)
        return size

    def reclaim(self) -> None:
        super().reclaim()
        self.torch.empty_cache()

    def drain_streams(self) -> None:
        """Wait for all work of the context, torch's too. Errors of the driver are logged; they come back at the next
        call."""
        try:
            self.context.call("cuCtxSynchronize")
        except DeviceError as error:
            log.error("%s: waiting for the device failed: %s", self.name, error)

    def _synchronize(self) -> None:
        super()._synchronize()
        self.context.call("cuCtxSynchronize")

    def _empty_cache(self) -> None:
        self.torch.empty_cache()

    # hooks ------------------------------------------------------------------------------------------------------

    def _create_stream(self) -> Stream:
        return CudaStream(self, self.context)

    def _create_pool(self) -> Pool:
        return CudaPool(self, self.context)

    def _create_vmm(self) -> VirtualMemory:
        return CudaVirtualMemory(self, self.context)

    def _allocate_blocking(self, nbytes: int, kind: str) -> tuple[int, object]:
        if kind == "managed":
            return self._take("cuMemFree", "cuMemAllocManaged", nbytes, _ATTACH_GLOBAL), None
        return self._take("cuMemFree", "cuMemAlloc", nbytes), None

    def _free_blocking(self, address: int, nbytes: int, memory: object) -> None:
        self.drain_streams()  # the driver may or may not wait by itself
        self._give(address)

    def _allocate_host(self, nbytes: int, kind: str) -> tuple[int, object]:
        if kind == "pinned":
            return self._take("cuMemFreeHost", "cuMemHostAlloc", nbytes, _PORTABLE), None
        block = HostBlock(nbytes, lock=False)
        return block.address, block

    def _free_host(self, address: int, nbytes: int, memory: object, kind: str) -> None:
        if kind == "pinned":
            self.drain_streams()  # a copy may still be reading it
            self._give(address)

    def _host_limit_bytes(self) -> int:
        return self.facts.host_total_bytes or 2**47

    def _tensor(self, address: int, dtype: str, shape: tuple[int, ...], nbytes: int, kind: str,
                keep: object) -> Tensor:  # fmt: skip
        if kind in _HOST_KINDS:
            return host_tensor(address, dtype, shape, nbytes, keep)
        return cuda_tensor(address, dtype, shape, nbytes, keep, self.torch_device)

    def _copy(self, target: int, source: int, nbytes: int, stream: Stream | None,
              touches: tuple[Touchable, ...]) -> None:  # fmt: skip
        order = _begin(stream, touches)
        self.context.call("cuMemcpyAsync", target, source, nbytes, order)
        if stream is None:
            self.context.call("cuStreamSynchronize", order)

    def _fill(self, address: int, value: int, nbytes: int, stream: Stream | None,
              touches: tuple[Touchable, ...]) -> None:  # fmt: skip
        order = _begin(stream, touches)
        if stream is None and self._on_host(address):
            ctypes.memset(address, value, nbytes)
            return
        self.context.call("cuMemsetD8Async", address, value, nbytes, order)
        if stream is None:
            self.context.call("cuStreamSynchronize", order)

    def _make_multicast(self) -> Multicast:
        raise DeviceError(
            f"NVLS unsupported: {self.name} can multicast, but this version does not bind its memory",
            call="make_multicast",
        )

    def _close(self) -> None:
        with ExitStack() as last:  # in reverse, each whatever the others do
            last.callback(self.context.close)
            for address in list(self._live):
                last.callback(self._give, address)
            pool = self.existing_pool
            if isinstance(pool, CudaPool):
                last.callback(pool.close)
            if self._vmm is not None:
                last.callback(self._vmm.close)

    def _take(self, free: str, allocate: str, *args: Any) -> int:
        """Allocate through the driver and remember how to give back."""
        address = int(self.context.call(allocate, *args))
        with self._live_lock:
            self._live[address] = free
        return address

    def _give(self, address: int) -> None:
        with self._live_lock:
            free = self._live.pop(address)
        self.context.call(free, address)

    def _on_host(self, address: int) -> bool:
        """Pageable memory is unknown to the driver; page-locked memory is of type host."""
        api = self.context.driver.api
        status, kind = api.cuPointerGetAttribute(api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        return bool(status) or int(kind) == _HOST_MEMORY


class _CudaBlocking(BlockingAllocator):
    """Asks the driver twice before it gives up."""

    device: CudaDevice

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        allocate, device = super().allocate, self.device
        return twice(
            lambda: allocate(nbytes, stream, owner),
            device.reclaim,
            lambda: device.out_of_memory(nbytes, owner=owner, kind=self.kind),
        )


class _CudaPinned(HostAllocator):
    """Page-locked memory; the driver's out of memory is the host's here."""

    device: CudaDevice

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        allocate, device = super().allocate, self.device
        return twice(
            lambda: allocate(nbytes, stream, owner),
            device.collect,
            lambda: AllocationError(nbytes, device.host_free_bytes(), kind=self.kind, owner=owner),
        )


def _begin(stream: Stream | None, touches: tuple[Touchable, ...]) -> Any:
    """Check what the work will touch, as far as that is known when it is submitted, and return the driver's stream."""
    for memory in touches:
        memory.check_use()
    if stream is None:
        return LEGACY_STREAM
    assert isinstance(stream, CudaStream)
    return stream.open_handle()


def _with_tensors(owners: dict[str, int], nbytes: int) -> dict[str, int]:
    return {**owners, TENSOR_OWNER: nbytes} if nbytes else owners
