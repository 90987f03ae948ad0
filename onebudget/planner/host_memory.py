"""Host memory that a setting per rank comes to on one machine, and what pinning makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebudget.units import ceil_div, format_bytes


@dataclass(frozen=True, slots=True)
class HostNeed:
    """All ranks of one machine together, and by how much that exceeds its memory (0: it fits)."""

    total_bytes: int
    short_bytes: int
    why: str

    @property
    def fits(self) -> bool:
        return self.short_bytes == 0


def host_need(tiers_per_rank: Sequence[int], ranks: int, host_bytes: int, *, shared_bytes: int = 0) -> HostNeed:
    """Every rank holds every tier: a size that was meant for the machine counts once per rank and manager.
    ``shared_bytes`` count once."""
    each = sum(tiers_per_rank)
    total = each * ranks + shared_bytes
    beside = f" and {format_bytes(shared_bytes)}" if shared_bytes else ""
    why = f"{format_bytes(each)} per rank x {ranks} ranks{beside} = {format_bytes(total)} of {format_bytes(host_bytes)}"
    return HostNeed(total, max(total - host_bytes, 0), why)


def tiers_in_proportion(first_bytes: int, device_pools: Sequence[int]) -> tuple[int, ...]:
    """Host tiers of several pools of one rank, sized like the pools they stand behind; the first gets
    ``first_bytes``."""
    return tuple(ceil_div(first_bytes * pool, device_pools[0]) for pool in device_pools)


def pinned_bytes(nbytes: int) -> int:
    """What torch's caching allocator of pinned memory takes for one allocation: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()
