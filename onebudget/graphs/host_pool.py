"""Device memory that graphs keep: segments that are never given back while a graph exists."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from onebudget.errors import AllocationError

if TYPE_CHECKING:
    import torch

    from onebudget.buffers import Buffer, BufferManager

OWNER = "graphs"


class SegmentPool:
    """Best-fit over whole segments that are not merged, as a private pool of a GPU behaves.

    A capture's memory is free again for the next capture when it ends, because one graph runs at a time. So captures
    in descending order need the largest one, and in ascending order their sum. ``scope`` is entered around every
    allocation.
    """

    def __init__(
        self, manager: BufferManager, *, scope: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._manager = manager
        self._scope = scope
        self.segments: list[Buffer] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.capacity_bytes for segment in self.segments)

    def place(self, nbytes: int, *, limit_bytes: int | None = None) -> torch.Tensor:
        """``[nbytes]`` uint8 at an address that stays. ``AllocationError`` when the device has no room, or all segments
        together would hold more than ``limit_bytes``."""
        fitting = [segment for segment in self.segments if segment.capacity_bytes >= nbytes]
        if not fitting:
            if limit_bytes is not None and self.allocated_bytes + nbytes > limit_bytes:
                raise AllocationError(nbytes, max(0, limit_bytes - self.allocated_bytes), owner=OWNER)
            with self._scope():
                fitting = [self._manager.gpu(nbytes, owner=OWNER)]
            self.segments += fitting
        return min(fitting, key=lambda segment: segment.capacity_bytes).as_tensor()[:nbytes]

    def release(self) -> None:
        """Give everything back. Safe to call again."""
        for segment in self.segments:
            if not segment.released:
                segment.release()
        self.segments = []
