"""Device memory whose physical pages can be taken away and brought back at the same address."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

from onebudget.buffers.counters import memory_counters
from onebudget.buffers.kinds import MemoryKind
from onebudget.buffers.virtual.chunk import Chunk, ChunkStatus, Configurator
from onebudget.buffers.virtual.config import VirtualConfig
from onebudget.buffers.virtual.manager import VirtualMemoryManager, virtual_memory_manager
from onebudget.buffers.virtual.restore import restore_step
from onebudget.device.allocators import Allocation, Allocator
from onebudget.device.base import Device
from onebudget.device.private_pool import PrivatePool
from onebudget.device.sample import round_to_sector
from onebudget.device.streams import Stream
from onebudget.errors import StateError
from onebudget.units import align_up, format_bytes


class PhysicalMemory:
    """Creator of a chunk: ``aligned_bytes`` of the card, of which ``live_bytes`` count as the owner's."""

    def __init__(self, device: Device, aligned_bytes: int, live_bytes: int, owner: str, tag: str) -> None:
        self._device = device
        self._aligned_bytes = aligned_bytes
        self._live_bytes = live_bytes
        self._owner = owner
        self._tag = tag

    def create(self) -> int:
        handle = self._device.vmm.create(
            self._aligned_bytes, owner=self._owner, live_bytes=self._live_bytes, tag=self._tag
        )
        memory_counters.add(MemoryKind.GPU, self._aligned_bytes)
        return handle

    def release(self, handle: int) -> None:
        memory_counters.add(MemoryKind.GPU, -self._aligned_bytes)
        self._device.vmm.release(handle)


class MapStep:
    """Maps the handle at the chunk's address and makes it accessible."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self._device = device
        self._address = address
        self._nbytes = nbytes

    def setup(self, handle: int) -> None:
        vmm = self._device.vmm
        with ExitStack() as undo:
            vmm.map(self._address, handle)
            undo.callback(vmm.unmap, self._address)
            vmm.set_access(self._address)
            if self._device.poison is not None:
                self._device.fill(self._address, self._device.poison, self._nbytes, None)
            undo.pop_all()

    def teardown(self, handle: int, *, destructing: bool) -> None:
        self._device.vmm.unmap(self._address)

    def drop(self) -> None:
        pass


class VirtualAllocation(Allocation):
    """Bytes that can be asleep: using them then is a ``StateError`` instead of a crash."""

    __slots__ = ("chunk", "tag")

    def __init__(self, address: int, nbytes: int, owner: str, tag: str, chunk: Chunk, pool: PrivatePool | None) -> None:
        super().__init__(address, nbytes, owner, detail=pool)
        self.tag = tag
        self.chunk = chunk

    def check_use(self) -> None:
        super().check_use()
        status = self.chunk.status
        if status is ChunkStatus.MATERIALIZED:
            return
        what = f"{format_bytes(self.nbytes)} of {self.owner!r} at {self.address:#x}"
        if status is ChunkStatus.RELEASED:
            raise StateError(f"{what} are asleep: call materialize_with_tag({self.tag!r}) first")
        raise StateError(f"{what} are lost: bringing tag {self.tag!r} back failed for them. Make the buffer anew.")


class VirtualAllocator(Allocator):
    """Allocates under one configuration; buffers remember it and free through it after the scope has ended."""

    kind = "gpu"
    counted_by_kind: ClassVar[bool] = True

    def __init__(
        self,
        device: Device,
        config: VirtualConfig,
        back_stream: Stream | None,
        *,
        manager: VirtualMemoryManager | None = None,
    ) -> None:
        self.device = device
        self.config = config
        self._back_stream = config.back_stream or back_stream
        self._private_pool = config.pools.current if config.pools is not None else None
        self._manager = manager or virtual_memory_manager()

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        """Reserve addresses for ``nbytes`` rounded up to the granule, and materialise at once.

        Contents are kept, zeroed or backed up for the first ``nbytes`` only. When any step fails all are undone.
        """
        vmm = self.device.vmm
        aligned = align_up(nbytes, vmm.alignment_bytes)
        with ExitStack() as undo:
            address = vmm.reserve(aligned)
            undo.callback(vmm.free_address, address)
            allocation = self._register(address, nbytes, aligned, owner)
            undo.pop_all()
        if self._private_pool is not None:
            self._private_pool.count(+1)
        return allocation

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        """Give everything back at once, after waiting for the device's streams."""
        allocation.begin_free()
        allocation.freed = True
        if isinstance(allocation.detail, PrivatePool):
            allocation.detail.count(-1)
        with ExitStack() as last:
            last.callback(self.device.vmm.free_address, allocation.address)
            self._manager.remove(allocation.address)

    def map(self, address: int, nbytes: int, owner: str) -> Allocation:
        """Put tagged physical memory at an address the caller reserved and keeps across release and materialise."""
        return self._register(address, nbytes, align_up(nbytes, self.device.vmm.alignment_bytes), owner)

    def unmap(self, address: int) -> None:
        """Take the memory of ``map`` away for good; then the caller may free the reservation."""
        if self._manager.remove(address).status is not ChunkStatus.INVALID:
            raise StateError(f"{address:#x} could not be unmapped")

    def _register(self, address: int, nbytes: int, aligned: int, owner: str) -> VirtualAllocation:
        device, config = self.device, self.config
        live_bytes = round_to_sector(nbytes)
        creator = PhysicalMemory(device, aligned, live_bytes, owner, config.tag)
        steps: list[Configurator] = [MapStep(device, address, aligned)]
        restore = restore_step(config.mode, device, address, nbytes, self._back_stream, owner)
        if restore is not None:
            steps.append(restore)
        chunk = self._manager.add(
            address, config.tag, creator=creator, configurators=steps, back_stream=self._back_stream,
            device=device,
        )  # fmt: skip
        return VirtualAllocation(address, live_bytes, owner, config.tag, chunk, self._private_pool)
