"""Many plans at once: a grid on all cores or on a Ray cluster, and which of its points no other beats."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError, OneBudgetError
from onebudget.planner.catalogue.gpus import find_gpu, parse_gpu
from onebudget.planner.grid import GridPoint
from onebudget.planner.policies import policy_for
from onebudget.planner.request import make_request
from onebudget.progress import SilentProgress

if TYPE_CHECKING:
    from onebudget.planner.policies.base import EnginePolicy, PlanRequest
    from onebudget.progress import Progress

SCHEMA = "onebudget.sweep/1"
WASTE_TERMS = ("fraction_slack",)
_LENGTH = {
    "onebudget": "max_seq_len", "vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len",
    "llamacpp": "n_ctx",
}  # fmt: skip
_WORTH_PROCESSES = 64
"""Fewer closed-form plans than this are done before other processes have started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """What one point came to. Tokens and concurrency are of all replicas (``dp``) together; ``waste`` is the share of a
    card that neither weights, cache nor work have; ``usd_per_hour`` of all cards. ``refused``: why there is no plan."""

    model: str
    gpu: str
    cards: int = 0
    engine: str
    engine_version: str | None
    tp: int
    pp: int
    ep: int
    dp: int
    weights_dtype: str | None
    kv_dtype: str | None
    settings: Mapping[str, object]
    fits: bool = False
    shortfall_bytes: int = 0
    kv_tokens: int = 0
    kv_bytes: int = 0
    low_tokens: int | None = None
    high_tokens: int | None = None
    concurrency: float = 0.0
    at_seq_len: int | None = None
    waste: float = 0.0
    bound_by: str | None = None
    usd_per_hour: float | None = None
    pareto: bool = False
    refused: str | None = None


Runner = Callable[[Callable[[GridPoint], SweepRow], Sequence[GridPoint]], Iterator[SweepRow]]
"""Applies a function to points, in order, wherever it likes."""


def sweep(
    points: Sequence[GridPoint],
    *,
    prices: Mapping[str, float] | None = None,
    runner: Runner | None = None,
    progress: Progress | None = None,
) -> tuple[SweepRow, ...]:
    """Plan every point; rows in the points' order, those that no other row of their model beats marked ``pareto``.

    ``prices``: dollars per hour of a card, by any of its names. A point that does not fit, or that its engine refuses,
    is a row with the shortfall or the reason. Raises ``ConfigError`` where every point is refused for one reason.
    """
    by_card = {find_gpu(name).name: price for name, price in (prices or {}).items()}
    rows = []
    with (progress or SilentProgress()).stage("plans", len(points)) as stage:
        for row in (runner or _local(points))(plan_point, points):
            rows.append(_priced(row, by_card))
            stage.advance()
    reasons = {row.refused for row in rows}
    if len(reasons) == 1 and None not in reasons:
        raise ConfigError(str(reasons.pop()), field="sweep")
    return mark_pareto(rows)


def plan_point(point: GridPoint) -> SweepRow:
    """One plan of the grid, as its row."""
    row = SweepRow(
        model=point.model.name, gpu=point.gpu, engine=point.engine, engine_version=point.engine_version,
        tp=point.tp or 1, pp=point.pp, ep=point.ep, dp=point.dp, weights_dtype=point.weights_dtype,
        kv_dtype=point.kv_dtype, settings=dict(point.settings),
    )  # fmt: skip
    try:
        request = make_request(point.model, point.gpu, **point.arguments())
        policy = _policy(point)
        ledger = policy.plan(request)
        atmost = _concurrency(policy, request, ledger, point.target_seq_len)
    except OneBudgetError as error:
        return replace(row, refused=" ".join(str(error).split()))
    kv, replicas = ledger.kv_cache, request.layout.dp
    wasted = ledger.unassigned_bytes + sum(term.bytes for term in ledger.terms if term.name in WASTE_TERMS)
    return replace(
        row, gpu=request.gpu.name, cards=request.n_gpus, engine_version=ledger.engine_version, tp=request.layout.tp,
        fits=ledger.fits, shortfall_bytes=ledger.shortfall_bytes, kv_tokens=kv.tokens * replicas,
        kv_bytes=kv.bytes * replicas, low_tokens=_times(kv.low_tokens, replicas),
        high_tokens=_times(kv.high_tokens, replicas), concurrency=round(atmost * replicas, 2),
        at_seq_len=point.target_seq_len or _length(point), waste=round(wasted / max(ledger.capacity_bytes, 1), 4),
        bound_by=next((cap.name for cap in ledger.caps if cap.binding), None),
    )  # fmt: skip


def _policy(point: GridPoint) -> EnginePolicy:
    if point.engine != "onebudget":
        return policy_for(point.engine)
    from onebudget.planner.policies.onebudget import OnebudgetPolicy

    return OnebudgetPolicy(quick=point.quick)


def _length(point: GridPoint) -> int | None:
    given = dict(point.settings).get(_LENGTH[point.engine])
    return given if isinstance(given, int) else None


def _concurrency(policy: EnginePolicy, request: PlanRequest, ledger: Ledger, length: int | None) -> float:
    """Requests at once of the longest length, or of ``length``: then of the same plan with that as the longest."""
    if not ledger.fits or length is None:
        return ledger.kv_cache.max_concurrency_at_max_seq_len
    shorter = replace(request, settings={**request.settings, _LENGTH[policy.name]: length})
    return policy.plan(shorter).kv_cache.max_concurrency_at_max_seq_len


def _times(tokens: int | None, replicas: int) -> int | None:
    return None if tokens is None else tokens * replicas


def _priced(row: SweepRow, prices: Mapping[str, float]) -> SweepRow:
    price = prices.get(row.gpu)
    return row if price is None or not row.cards else replace(row, usd_per_hour=round(price * row.cards, 4))


def mark_pareto(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Rows that fit and that no other row of their model is at least as good as in tokens, concurrency, waste and
    price (cards, where prices are not known of all), and better in one of them."""
    priced = all(row.usd_per_hour is not None for row in rows if row.fits)
    models: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        if row.fits:
            models.setdefault(row.model, []).append(_merits(row, priced=priced))
    fronts = {model: _front(set(merits)) for model, merits in models.items()}
    return tuple(
        replace(row, pareto=row.fits and _merits(row, priced=priced) in fronts[row.model]) for row in rows
    )  # fmt: skip


def _merits(row: SweepRow, *, priced: bool) -> tuple[float, ...]:
    """More is better in each."""
    price = row.usd_per_hour if priced and row.usd_per_hour is not None else row.cards
    return (-float(price), float(row.kv_tokens), row.concurrency, -row.waste)


def _front(merits: set[tuple[float, ...]]) -> set[tuple[float, ...]]:
    """Going down in order, whatever could beat a point has come before it."""
    front: list[tuple[float, ...]] = []
    for each in sorted(merits, reverse=True):
        if not any(all(a >= b for a, b in zip(other, each, strict=True)) for other in front):
            front.append(each)
    return set(front)


def _local(points: Sequence[GridPoint]) -> Runner:
    worth = len(points) >= _WORTH_PROCESSES or (len(points) > 1 and any(not point.quick for point in points))
    return on_cores() if worth else in_process


def in_process(work: Callable[[GridPoint], SweepRow], points: Sequence[GridPoint]) -> Iterator[SweepRow]:
    """One after the other, here."""
    return map(work, points)


def on_cores(cores: int | None = None) -> Runner:
    """On ``cores`` processes of this machine; all that this process may use when left out."""

    def run(work: Callable[[GridPoint], SweepRow], points: Sequence[GridPoint]) -> Iterator[SweepRow]:
        workers = min(cores or len(os.sched_getaffinity(0)), len(points))
        context = multiprocessing.get_context("spawn")
        chunk = max(1, min(32, len(points) // (4 * workers)))
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            yield from pool.map(work, points, chunksize=chunk)

    return run


def on_ray(address: str) -> Runner:
    """On a Ray cluster. ``ConfigError`` where ray is not installed or nobody answers at ``address``."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--ray needs ray, which is not installed: pip install ray.", field="--ray") from error

    def run(work: Callable[[GridPoint], SweepRow], points: Sequence[GridPoint]) -> Iterator[SweepRow]:
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"No Ray cluster at {address!r}: {reason}", field="--ray", value=address) from error
        try:
            remote = ray.remote(work)
            for reference in [remote.remote(point) for point in points]:
                yield ray.get(reference)
        finally:
            ray.shutdown()

    return run


def sweep_document(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """The JSON document of a sweep."""
    return {
        "schema": SCHEMA,
        "points": len(rows),
        "fitting": sum(row.fits for row in rows),
        "refused": sum(row.refused is not None for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def check_cards(gpus: Sequence[str], total_bytes: int | None) -> None:
    """``ConfigError`` with near matches for a card nobody knows, before any plan is made."""
    for gpu in gpus:
        try:
            find_gpu(gpu)
        except ConfigError:
            find_gpu(parse_gpu(gpu)[0], total_bytes=total_bytes)
