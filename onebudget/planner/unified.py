"""Cards whose memory is the machine's: what of it an engine can really have."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from onebudget.units import GIB, format_bytes

if TYPE_CHECKING:
    from onebudget.planner.policies.base import PlanRequest

OS_RESERVE_BYTES = 4 * GIB
"""What a machine keeps for itself where only its whole memory is known, not what is available of it (assumed)."""


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
        kept = f" less {format_bytes(os_reserve_bytes)} for itself" if os_reserve_bytes else ""
        can_give = f"the system can give {format_bytes(available_bytes)}{kept}"
        return Usable(given, f"{can_give}, below {fraction} of {format_bytes(total_bytes)}")
    return Usable(share, f"{fraction} of {format_bytes(total_bytes)}, which the system can give")


def system_bound(request: PlanRequest, fraction: float = 1.0) -> Usable | None:
    """What of a unified card's share the system can give; None for other cards, and where neither its free memory nor
    the machine's is known."""
    offers = [(request.free_bytes, 0), (request.host_memory_bytes, OS_RESERVE_BYTES)]
    known = [(given, reserve) for given, reserve in offers if given is not None]
    if not request.gpu.unified or not known:
        return None
    available, reserve = min(known, key=lambda offer: offer[0] - offer[1])
    return usable_on_unified(request.total_bytes or request.gpu.total_bytes, fraction, available, reserve)


def free_at_start(request: PlanRequest) -> int | None:
    """Bytes an engine finds free on the card: as given, and on unified memory no more than the system can give."""
    bound = system_bound(request)
    return request.free_bytes if bound is None else bound.bytes


def system_notes(request: PlanRequest, fraction: float = 1.0) -> tuple[str, ...]:
    """The bound in words, where there is one."""
    bound = system_bound(request, fraction)
    return () if bound is None else (f"Unified memory: {bound.why}.",)
