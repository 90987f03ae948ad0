"""From an engine's parts to a ledger that sums to the card, with the range of the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onebudget.budget.ledger import Cap, Change, DeviceLine, KVCacheLine, KVGroup, Ledger, Phase, Term
from onebudget.planner.policies.base import Figure, PlanRequest
from onebudget.units import format_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One share of the card and who holds it."""

    name: str
    owner: str
    figure: Figure
    phase: Phase = "profile"


@dataclass(frozen=True, slots=True)
class Budget:
    """What the engine may use: the limit it sets itself, its name and value; ``spread_bytes`` is how far the limit may
    be off because the card's total is not known exactly."""

    limit_bytes: int
    cap_name: str
    cap_value: float | int | None
    spread_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """How bytes become tokens: ``tokens`` is the figure the engine prints, ``blocks`` what it allocates.

    ``token_factors``: how far the tokens may be off, down and up, even where the bytes are known.
    """

    tokens: Callable[[int], int]
    blocks: Callable[[int], int]
    tokens_per_block: int
    bytes_per_token: int
    fixed_bytes: int = 0
    concurrency: Callable[[int], float]
    groups: Callable[[int], Sequence[KVGroup]] = lambda nbytes: ()
    needed_bytes: int = 0
    token_factors: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All a policy has worked out. ``charged`` is taken off the limit, ``outside`` lives in what the limit leaves."""

    capacity_bytes: int
    budget: Budget
    charged: tuple[Part, ...]
    outside: tuple[Part, ...]
    pool: Pool
    engine: str
    version: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    free_bytes: int | None = None


def pool_range(budget: Budget, charged: Iterable[Part]) -> tuple[int, int, int]:
    """Bytes left for the pool, and bounds: independent errors add in squares."""
    parts = [part.figure for part in charged]
    pool = budget.limit_bytes - sum(figure.bytes for figure in parts)
    up = math.hypot(budget.spread_bytes, *(figure.bytes - figure.low_bytes for figure in parts))
    down = math.hypot(budget.spread_bytes, *(figure.high_bytes - figure.bytes for figure in parts))
    return pool, pool - math.ceil(down), pool + math.ceil(up)


def build_ledger(request: PlanRequest, outcome: Outcome) -> Ledger:
    """The ledger; ``fits`` False with a shortfall where a longest request does not fit the pool."""
    pool, low, high = pool_range(outcome.budget, outcome.charged)
    needed = max(outcome.pool.needed_bytes, 1)
    refused = outcome.free_bytes is not None and outcome.free_bytes < outcome.budget.limit_bytes
    fits = pool >= needed and not refused
    usable = max(pool, 0)
    kv = _kv_line(outcome.pool, usable if fits else 0, max(low, 0), max(high, 0))
    terms = _terms(outcome, usable)
    unassigned = outcome.capacity_bytes - sum(term.bytes for term in terms) - kv.bytes
    short = max(needed - pool, outcome.budget.limit_bytes - (outcome.free_bytes or outcome.budget.limit_bytes), 0)
    return Ledger(
        model=request.model.name or None,
        engine=outcome.engine,
        engine_version=outcome.version,
        device=DeviceLine(
            name=request.gpu.name, kind="planned", total_bytes=outcome.capacity_bytes,
            free_at_start_bytes=outcome.free_bytes or outcome.capacity_bytes,
        ),
        capacity_bytes=outcome.capacity_bytes,
        terms=terms,
        kv_cache=kv,
        unassigned_bytes=unassigned,
        caps=(Cap(outcome.budget.cap_name, outcome.budget.cap_value, max(outcome.budget.limit_bytes, 0), True),),
        fits=fits,
        shortfall_bytes=0 if fits else short,
        changes=outcome.changes,
        notes=outcome.notes,
        warnings=(*outcome.warnings, *(_refusals(outcome, pool, needed, refused=refused))),
    )  # fmt: skip


def widened(ledger: Ledger, others: Iterable[Ledger]) -> Ledger:
    """The ledger with a range of the cache that takes in those of ``others``: plans of versions that may as well be
    meant."""
    lines = [each.kv_cache for each in (ledger, *others)]
    span: dict[str, Any] = {
        "low_bytes": min(line.low_bytes or 0 for line in lines),
        "high_bytes": max(line.high_bytes or 0 for line in lines),
        "low_tokens": min(line.low_tokens or 0 for line in lines),
        "high_tokens": max(line.high_tokens or 0 for line in lines),
    }
    return ledger.replace(kv_cache=replace(ledger.kv_cache, **span))


def _refusals(outcome: Outcome, pool: int, needed: int, *, refused: bool) -> Iterable[str]:
    if refused:
        yield (
            f"{outcome.engine} refuses to start: {format_bytes(outcome.free_bytes or 0)} are free and its limit is "
            f"{format_bytes(outcome.budget.limit_bytes)}."
        )
    if pool < needed:
        yield (
            f"The pool of {format_bytes(max(pool, 0))} is smaller than the {format_bytes(needed)} that one longest "
            "request takes."
        )


def _kv_line(pool: Pool, nbytes: int, low: int, high: int) -> KVCacheLine:
    blocks = pool.blocks(nbytes) if nbytes else 0
    return KVCacheLine(
        bytes=nbytes,
        tokens=pool.tokens(nbytes) if nbytes else 0,
        blocks=blocks,
        tokens_per_block=pool.tokens_per_block,
        bytes_per_token=pool.bytes_per_token,
        fixed_bytes=pool.fixed_bytes,
        max_concurrency_at_max_seq_len=round(pool.concurrency(nbytes), 4) if nbytes else 0.0,
        groups=tuple(pool.groups(nbytes)) if nbytes else (),
        low_bytes=low,
        high_bytes=high,
        low_tokens=int(pool.tokens(low) * pool.token_factors[0]),
        high_tokens=int(pool.tokens(high) * pool.token_factors[1]),
        basis="modelled",
    )


def _terms(outcome: Outcome, pool_bytes: int) -> tuple[Term, ...]:
    """Charged parts within the limit, outside parts within the rest; what exceeds either is cut to what is there."""
    limit = min(max(outcome.budget.limit_bytes, 0), outcome.capacity_bytes)
    inside = _charge(outcome.charged, max(limit - pool_bytes, 0))
    outside = _charge(outcome.outside, outcome.capacity_bytes - limit)
    slack = outcome.capacity_bytes - limit - sum(term.bytes for term in outside)
    why = f"what {outcome.budget.cap_name} leaves beside the parts outside the budget"
    rest = (Term("fraction_slack", outcome.engine, slack, "exact", "reserve", why=why),) if slack > 0 else ()
    return _merge([*inside, *outside, *rest])


def _charge(parts: Iterable[Part], room: int) -> list[Term]:
    terms = []
    for part in parts:
        figure = part.figure
        taken = min(max(figure.bytes, 0), room)
        room -= taken
        if taken > 0 or figure.high_bytes > 0:
            low, high = max(figure.low_bytes, 0), max(figure.high_bytes, 0)
            terms.append(Term(part.name, part.owner, taken, figure.basis, part.phase, low, high, figure.why))
    return terms


def _merge(terms: Sequence[Term]) -> tuple[Term, ...]:
    merged: dict[str, Term] = {}
    for term in terms:
        before = merged.get(term.name)
        merged[term.name] = term if before is None else _sum(before, term)
    return tuple(merged.values())


def _sum(one: Term, other: Term) -> Term:
    low = (one.low_bytes or 0) + (other.low_bytes or 0)
    high = (one.high_bytes or 0) + (other.high_bytes or 0)
    why = "; ".join(text for text in (one.why, other.why) if text)
    return Term(one.name, one.owner, one.bytes + other.bytes, one.basis, one.phase, low, high, why)
