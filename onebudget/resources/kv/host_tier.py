"""Evicted blocks in page-locked host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from onebudget.errors import AllocationError, DeviceError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager

logger = logging.getLogger(__name__)

OWNER = "host_kv_tier"


class HostTier:
    """``num_slots`` rows of ``block_bytes``. Copies to and from them are in the order of the execution stream."""

    name = "host"
    in_memory = True

    def __init__(self, manager: BufferManager, num_slots: int, block_bytes: int, *, pinned: bool = True) -> None:
        """Memory that can't be locked is used as it is, with one warning; without ``pinned`` nobody tries to lock it.
        ``AllocationError`` when there is none."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._buffer, self.pinned = _take(manager, num_slots * block_bytes, pinned)
        self._rows = self._buffer.as_tensor().view(num_slots, block_bytes)

    def row(self, slot: int) -> torch.Tensor:
        return self._rows[slot]

    def write(self, slot: int, data: bytes) -> bool:
        self._rows[slot].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return True

    def read(self, slot: int) -> bytes:
        """Waits for copies to the row that are still on their way."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._rows[slot].numpy().tobytes()

    def discard(self, slots: Sequence[int]) -> None:
        """A row is simply written over."""

    def release(self) -> None:
        del self._rows
        self._buffer.release()


def _take(manager: BufferManager, nbytes: int, pinned: bool) -> tuple[Buffer, bool]:
    if pinned:
        try:
            buffer = manager.pinned(nbytes, owner=OWNER)
            return buffer, all(getattr(each.memory, "locked", True) for each in buffer.touches())
        except (AllocationError, DeviceError) as error:
            logger.warning(
                "the host tier of %s is not page-locked, copies to it are slower: %s", format_bytes(nbytes), error
            )
    return manager.cpu(nbytes, owner=OWNER), False
