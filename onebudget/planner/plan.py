"""``onebudget.plan``: what an engine will do with a card, before anyone rents it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError
from onebudget.planner.answers import answers_of, meets_target
from onebudget.planner.cache import find_plan, keep_plan, plan_key
from onebudget.planner.changes import find_changes
from onebudget.planner.host import on_host
from onebudget.planner.question import Question, make_question
from onebudget.planner.ranks import rank_table
from onebudget.progress import SilentProgress
from onebudget.units import parse_bytes

if TYPE_CHECKING:
    from onebudget.planner.source import ModelSource
    from onebudget.progress import Progress


def plan(
    model: str | Path | ModelSource,
    gpu: str,
    *,
    engine: str = "onebudget",
    engine_version: str | None = None,
    tp: int | None = None,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    gpu_total: str | int | None = None,
    gpu_free: str | int | None = None,
    host_memory: str | int | None = None,
    settings: Mapping[str, object] | None = None,
    target_seq_len: int | None = None,
    target_concurrency: int | None = None,
    quick: bool = False,
    use: str = "server",
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    **knobs: Any,
) -> Ledger:
    """Plan ``model`` on ``gpu`` (``"H100-SXM-80GB"``, ``"H100x8"``, ``"host"``, or any name with ``gpu_total``).

    ``settings`` and further keywords are settings of ``engine`` by its own names. Sizes are bytes or texts such as
    ``"80GB"``, per card. ``quick`` takes closed forms where a dry run of our own engine would take seconds. ``use`` is
    ``"server"`` or ``"offline"``, where an engine's defaults depend on it.

    The ledger is of the rank that limits the pool. A plan that does not fit comes back with ``fits`` False, the
    shortfall, and ``changes`` that were planned again and do fit, cheapest first; so does one that misses its target.
    Raises ``ConfigError`` or ``ModelError`` for whatever is unknown, contradictory or absurd.
    """
    asked: dict[str, Any] = {
        "engine": engine, "engine_version": engine_version, "tp": tp, "pp": pp, "ep": ep, "dp": dp,
        "weights_dtype": weights_dtype, "kv_dtype": kv_dtype, "total_bytes": _size("gpu_total", gpu_total),
        "free_bytes": _size("gpu_free", gpu_free), "settings": {**(settings or {}), **knobs},
        "target_seq_len": _count("target_seq_len", target_seq_len),
        "target_concurrency": _count("target_concurrency", target_concurrency), "quick": quick, "use": use,
    }  # fmt: skip
    return plan_asked(
        model, gpu, asked, host_memory_bytes=_size("host_memory", host_memory), revision=revision, offline=offline,
        progress=progress,
    )  # fmt: skip


def plan_asked(
    model: str | Path | ModelSource,
    gpu: str,
    asked: Mapping[str, Any],
    *,
    host_memory_bytes: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Ledger:
    """``plan`` with its question as a mapping; an equal question was answered before is read from disk."""
    key = None
    if isinstance(model, (str, Path)):
        model = str(model)
        key = plan_key(
            {"model": model, "gpu": gpu, "revision": revision, "offline": offline, "host": host_memory_bytes, **asked}
        )
        known = find_plan(key)
        if known is not None:
            return Ledger.from_dict(known)
    with (progress or SilentProgress()).stage("plan", None):
        question = make_question(model, gpu, revision=revision, offline=offline, **asked)
        ledger = answer(question, host_memory_bytes=host_memory_bytes)
    if key is not None:
        asked_the_hub = question.model.origin.startswith("hub") or question.model.origin == "catalogue"
        keep_plan(key, ledger.to_dict(), asked_the_hub=asked_the_hub)
    return ledger


def answer(question: Question, *, host_memory_bytes: int | None = None) -> Ledger:
    """The plan with everything people ask of one: ranks, host memory, answers, and ways out where it falls short.

    With ``host_memory_bytes`` a plan whose ranks keep more than that on their host does not fit."""
    question = on_host(question, host_memory_bytes)
    ledger = question.policy().widened(question.request(), question.ledger())
    ranks, limiting = rank_table(question.request(), ledger)
    ledger = ledger.replace(ranks=ranks or ledger.ranks, limiting_rank=limiting, answers=answers_of(question, ledger))
    if not meets_target(question, ledger):
        ledger = ledger.replace(changes=find_changes(question, ledger))
    return ledger


def replan(question: Question, change: Mapping[str, Any]) -> Ledger:
    """The plan with one of a ledger's ``changes`` applied."""
    return answer(replace(question.changed(change)))


def _size(field: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError.for_field(field, value, "a size such as 80GB or 24GiB") from error


def _count(field: str, value: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**30:
        raise ConfigError.for_field(field, value, f"a whole number from 1 to {2**30}")
    return value
