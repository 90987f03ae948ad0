"""Cards whose memory is the machine's: what of it an engine can really have."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from onebudget.units import format_bytes


@dataclass(frozen=True, slots=True)
class Usable:
    """Bytes, and which of the two limits is the lower one."""

    bytes: int
    why: str


def usable_on_unified(total_bytes: int, fraction: float, available_bytes: int, os_reserve_bytes: int = 0) -> Usable:
    """The smaller of the fraction's share and what the system can give (its free memory and its page cache), less
    what it needs itself. The driver's free memory counts the page cache as used, so it says nothing here."""
    share = int(total_bytes * Fraction(str(fraction)))
    given = max(available_bytes - os_reserve_bytes, 0)
    if given < share:
        return Usable(
            given,
            f"the system can give {format_bytes(available_bytes)} less {format_bytes(os_reserve_bytes)} for itself, "
            f"below {fraction} of {format_bytes(total_bytes)}",
        )
    return Usable(share, f"{fraction} of {format_bytes(total_bytes)}, which the system can give")
