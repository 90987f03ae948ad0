"""Host memory that goes with a plan: what each rank takes, and what all of them together take of a host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import HostLine
from onebudget.planner.host_memory import HostNeed, host_need
from onebudget.planner.host_tiers import tiers_of
from onebudget.planner.question import Question
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.policies.base import PlanRequest

CARDS_PER_HOST = 8
TOTAL = "all_ranks_of_a_host"
CARD_SHARE = "card_share"
"""What lives on a card of unified memory: the machine's own memory too."""
_STAGING = "load_staging"
_ON_DISK = "disk_kv_tier"
_ONE_PROCESS = "llamacpp"
_NOT_USED = ("fraction_slack", "other_processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedQuestion(Question):
    """A question whose plan has to fit its host too. ``host_memory_bytes`` None: the host is not checked."""

    host_memory_bytes: int | None = None

    def request(self) -> PlanRequest:
        return replace(Question.request(self), host_memory_bytes=self.host_memory_bytes)

    def ledger(self) -> Ledger:
        return with_host_lines(self.request(), Question.ledger(self))

    def document(self, request: PlanRequest) -> dict[str, Any]:
        given = {"host_memory_bytes": self.host_memory_bytes} if self.host_memory_bytes is not None else {}
        return Question.document(self, request) | given


def on_host(question: Question, host_memory_bytes: int | None = None) -> HostedQuestion:
    """The question with a host of ``host_memory_bytes``; one that has a host already keeps it where none is given."""
    if isinstance(question, HostedQuestion):
        return question if host_memory_bytes is None else replace(question, host_memory_bytes=host_memory_bytes)
    asked = {each.name: getattr(question, each.name) for each in fields(Question)}
    return HostedQuestion(**asked, host_memory_bytes=host_memory_bytes)


def ranks_per_host(request: PlanRequest) -> int:
    """Ranks that share one machine's memory. A card of unified memory is a machine of its own."""
    return 1 if request.gpu.unified else min(request.n_gpus, CARDS_PER_HOST)


def with_host_lines(request: PlanRequest, ledger: Ledger) -> Ledger:
    """The ledger with host memory per rank and per host. Where a host is too small for what its ranks keep there, the
    plan does not fit; where only loading exceeds it, a warning says so, because files can be read piece by piece."""
    ranks = 1 if ledger.engine == _ONE_PROCESS else ranks_per_host(request)
    tiers = tiers_of(request, ledger, ranks)
    lines = [*(ledger.host or [_staging(ledger)]), *tiers.lines, *_card_share(request, ledger)]
    total = host_total_bytes(lines, ranks)
    shown = [*lines, HostLine(TOTAL, total, "host")] if ranks > 1 else lines
    ledger = ledger.replace(host=tuple(shown), notes=(*ledger.notes, *tiers.notes))
    host_bytes = request.host_memory_bytes or (ledger.capacity_bytes if request.gpu.unified else None)
    if host_bytes is None:
        return ledger
    need = _need(lines, ranks, max(0, host_bytes - tiers.reserve_bytes))
    if not need.fits:
        return _too_small(ledger, need, ranks, host_bytes, tiers.reserve_bytes)
    if total > host_bytes:
        words = _words(total, ranks, host_bytes)
        return ledger.replace(warnings=(*ledger.warnings, f"{words}, as long as weights are loaded."))
    return ledger


def host_total_bytes(lines: list[HostLine], ranks: int) -> int:
    """What the ranks of one host take together: lines of a rank count once for each."""
    counted = [line for line in lines if line.name not in (TOTAL, _ON_DISK)]
    return sum(line.bytes * (ranks if line.per == "rank" else 1) for line in counted)


def _need(lines: list[HostLine], ranks: int, host_bytes: int) -> HostNeed:
    """What stays in the host's memory while requests are served."""
    kept = [line for line in lines if line.name not in (TOTAL, _ON_DISK, _STAGING)]
    shared = sum(line.bytes for line in kept if line.per == "host")
    return host_need([line.bytes for line in kept if line.per == "rank"], ranks, host_bytes, shared_bytes=shared)


def _staging(ledger: Ledger) -> HostLine:
    weights = ledger.term("weights")
    return HostLine(_STAGING, max(weights.bytes, weights.low_bytes or 0), "rank")


def _card_share(request: PlanRequest, ledger: Ledger) -> list[HostLine]:
    if not request.gpu.unified:
        return []
    used = sum(term.bytes for term in ledger.terms if term.name not in _NOT_USED) + ledger.kv_cache.bytes
    return [HostLine(CARD_SHARE, used, "rank")]


def _words(total_bytes: int, ranks: int, host_bytes: int) -> str:
    who = f"{ranks} ranks take" if ranks > 1 else "One rank takes"
    return f"{who} {format_bytes(total_bytes)} of a host with {format_bytes(host_bytes)}"


def _too_small(ledger: Ledger, need: HostNeed, ranks: int, host_bytes: int, reserve_bytes: int) -> Ledger:
    """The plan without its cache: it can't be served."""
    most = format_bytes(max(0, host_bytes - reserve_bytes) // ranks)
    left = f", of which {format_bytes(reserve_bytes)} have to stay free" if reserve_bytes else ""
    warning = (
        f"{_words(need.total_bytes, ranks, host_bytes)}{left}: {need.why}. Every rank allocates its own, so at most "
        f"{most} each."
    )
    kv = ledger.kv_cache
    return ledger.replace(
        fits=False, shortfall_bytes=max(ledger.shortfall_bytes, need.short_bytes),
        kv_cache=replace(kv, bytes=0, tokens=0, blocks=0, groups=(), max_concurrency_at_max_seq_len=0.0),
        unassigned_bytes=ledger.unassigned_bytes + kv.bytes, warnings=(*ledger.warnings, warning),
    )  # fmt: skip
