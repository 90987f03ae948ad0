"""Readings of a card: plain values, no torch, no driver."""

from __future__ import annotations

from dataclasses import dataclass

SECTOR_BYTES = 512
"""What the CUDA caching allocator rounds every request up to; all live-byte counts here are multiples of it."""


def round_to_sector(nbytes: int) -> int:
    """``nbytes`` rounded up to the 512 B an allocator really hands out."""
    return (nbytes + (SECTOR_BYTES - 1)) & -SECTOR_BYTES


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One reading of a card, in bytes.

    ``alloc_live`` counts bytes handed out (tensors and live buffers, each rounded up to 512 B); ``alloc_peak`` is its
    high-water mark since ``reset_peak()``. ``total - free`` is physical use, including idle memory that a pool keeps
    and what other processes hold, so it is at least ``alloc_live``.
    """

    total: int
    free: int
    alloc_live: int
    alloc_peak: int

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes a pool holds (``reserved``), has handed out (``used``), and keeps idle (``free = reserved - used``)."""

    reserved: int
    used: int
    free: int
