"""One grow-only scratch buffer for all attention layers: the largest demand, not the sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from onebudget.device.sample import round_to_sector

if TYPE_CHECKING:
    import torch

    from onebudget.buffers import Buffer, BufferManager

OWNER = "fixed_workspace"


class ScratchBuffer:
    """Bytes that layers share one after the other.

    ``require(n)`` keeps the storage while ``n`` fits and otherwise reallocates: the address changes and contents are
    lost, so views are valid until the next ``require``. ``peak_bytes`` is the largest demand so far. ``scope`` is
    entered around every allocation.
    """

    def __init__(
        self, manager: BufferManager, *, scope: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._manager = manager
        self._scope = scope
        self._buffer: Buffer | None = None
        self.logical_bytes = 0
        self.peak_bytes = 0
        self.grow_count = 0

    @property
    def buffers(self) -> list[Buffer]:
        return [] if self._buffer is None else [self._buffer]

    @property
    def held_bytes(self) -> int:
        """What the device's books count for it: the capacity in whole sectors."""
        return round_to_sector(self.capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.capacity_bytes

    def require(self, nbytes: int, *, owner: str = OWNER) -> torch.Tensor:
        """A ``[nbytes]`` uint8 view. Raises ``AllocationError`` when the device has no room to grow.

        ``owner``: for whom the memory is counted, and whose name an error bears, if it has to grow.
        """
        if nbytes > self.capacity_bytes:
            self._grow(nbytes, owner)
        self.logical_bytes = nbytes
        self.peak_bytes = max(self.peak_bytes, nbytes)
        assert self._buffer is not None
        return self._buffer.as_tensor()[:nbytes]

    def _grow(self, nbytes: int, owner: str) -> None:
        self.release()
        with self._scope():
            self._buffer = self._manager.gpu(nbytes, owner=owner)
        self.grow_count += 1

    def start_anew(self) -> None:
        """As after construction: no storage, and no marks of what was wanted before."""
        self.release()
        self.peak_bytes = self.grow_count = 0

    def release(self) -> None:
        """Give the storage back; the next ``require`` allocates anew."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
        self.logical_bytes = 0
