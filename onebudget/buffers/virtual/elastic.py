"""Device memory that comes and goes by pieces behind addresses that stay."""

from __future__ import annotations

from contextlib import ExitStack

from onebudget.buffers.buffer import Buffer
from onebudget.buffers.kinds import MemoryKind
from onebudget.buffers.virtual.allocator import VirtualAllocator
from onebudget.device.allocators import Allocation
from onebudget.device.private_pool import PrivatePool
from onebudget.device.streams import Stream
from onebudget.errors import ConfigError
from onebudget.units import align_up

ELASTIC_TAG = "elastic"
"""Of pieces that are made outside any scope, which nobody puts to sleep."""


class ElasticAllocation(Allocation):
    """A reservation and the pieces of memory in it by offset. It can be used while no piece is asleep or lost."""

    __slots__ = ("pieces",)

    def __init__(self, address: int, nbytes: int, owner: str, pool: PrivatePool | None) -> None:
        super().__init__(address, nbytes, owner, detail=pool)
        self.pieces: dict[int, Allocation] = {}

    def check_use(self) -> None:
        super().check_use()
        for piece in self.pieces.values():
            piece.check_use()


class ElasticAllocator(VirtualAllocator):
    """Reserves addresses only; ``ElasticBuffer`` puts memory behind them, under the configuration of this allocator."""

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> ElasticAllocation:
        address = self.device.vmm.reserve(align_up(nbytes, self.device.vmm.alignment_bytes))
        if self._private_pool is not None:
            self._private_pool.count(+1)
        return ElasticAllocation(address, nbytes, owner, self._private_pool)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        """Give pieces and addresses back at once, after waiting for the device's streams."""
        assert isinstance(allocation, ElasticAllocation)
        allocation.begin_free()
        allocation.freed = True
        if self._private_pool is not None:
            self._private_pool.count(-1)
        with ExitStack() as last:
            last.callback(self.device.vmm.free_address, allocation.address)
            for offset in allocation.pieces:
                last.callback(self._manager.remove, allocation.address + offset)
            allocation.pieces = {}


class ElasticBuffer(Buffer):
    """``size`` elements of addresses, none of which may be touched before ``map`` put memory there.

    ``capacity_bytes`` is what is mapped. Made by ``BufferManager.elastic``.
    """

    __slots__ = ("_pieces_of",)
    _pieces_of: ElasticAllocator

    def __init__(
        self, source: ElasticAllocator, owner: str, shape: tuple[int, ...], size: int, element: tuple[str, int]
    ) -> None:
        super().__init__(source.device, MemoryKind.GPU, source, None, owner, shape, size, element)
        self._pieces_of = source
        self.capacity_bytes = 0

    def map(self, start: int, nbytes: int) -> None:
        """Put memory behind ``nbytes`` from byte ``start`` on, both multiples of the device's alignment; nothing where
        that piece is there already. Its contents are undefined. ``AllocationError`` when there is none."""
        allocation = self._reservation
        if start in allocation.pieces:
            return
        alignment = self.device.vmm.alignment_bytes
        if start % alignment or nbytes % alignment:
            raise ConfigError.for_field("piece", (start, nbytes), f"multiples of {alignment}")
        allocation.pieces[start] = self._pieces_of.map(allocation.address + start, nbytes, self.owner)
        self.capacity_bytes += nbytes

    def unmap(self, start: int) -> None:
        """Take the piece at byte ``start`` away, if there is one, after waiting for the device's streams."""
        allocation = self._reservation
        piece = allocation.pieces.pop(start, None)
        if piece is None:
            return
        self.capacity_bytes -= piece.nbytes
        self._pieces_of.unmap(allocation.address + start)

    @property
    def _reservation(self) -> ElasticAllocation:
        (allocation,) = self.touches()
        assert isinstance(allocation, ElasticAllocation)
        return allocation
