"""Host memory that goes with a plan: what each rank takes, and what all of them together take of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.budget.ledger import HostLine
from onebudget.units import GIB, format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.policies.base import PlanRequest

CARDS_PER_HOST = 8
TOTAL = "all_ranks_of_a_host"
_GIB_PER_RANK = {"swap_space": "kv_swap", "cpu_offload_gb": "offloaded_weights", "hicache_size": "host_kv_tier"}


def with_host_lines(request: PlanRequest, ledger: Ledger, *, host_memory_bytes: int | None = None) -> Ledger:
    """The ledger with host memory per rank and per host, and a warning where a host of ``host_memory_bytes`` is too
    small for its ranks."""
    weights = ledger.term("weights")
    lines = list(ledger.host) or [HostLine("load_staging", max(weights.bytes, weights.low_bytes or 0), "rank")]
    for setting, name in _GIB_PER_RANK.items():
        value = request.settings.get(setting)
        if isinstance(value, (int, float)) and value:
            lines.append(HostLine(name, int(value * GIB), "rank"))
    ranks = min(request.layout.ranks, CARDS_PER_HOST)
    total = host_total_bytes(lines, ranks)
    if ranks > 1:
        lines.append(HostLine(TOTAL, total, "host"))
    warnings = ledger.warnings
    if host_memory_bytes is not None and total > host_memory_bytes:
        warnings = (
            *warnings,
            f"{ranks} ranks take {format_bytes(total)} of a host with {format_bytes(host_memory_bytes)}: every rank "
            f"allocates its own, so at most {format_bytes(host_memory_bytes // ranks)} each.",
        )
    return ledger.replace(host=tuple(lines), warnings=warnings)


def host_total_bytes(lines: list[HostLine], ranks: int) -> int:
    """What the ranks of one host take together: lines of a rank count once for each."""
    return sum(line.bytes * (ranks if line.per == "rank" else 1) for line in lines if line.name != TOTAL)
