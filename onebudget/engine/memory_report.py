"""The live ledger: what was planned beside what is held now, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onebudget.engine.measured import measured_terms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onebudget.budget.ledger import Ledger
    from onebudget.engine.build import Engine
    from onebudget.resources.kv.group import KVGroup

FLAGGED_PERCENT = 5
_SEEN = ("exact", "measured")
"""Bases whose bytes are there all the time; what others plan for may not have come yet."""


def memory_report(engine: Engine) -> dict[str, Any]:
    """What ``measured_terms`` says, and beside it the ledger's lines with what they became.

    ``lines`` compare the peak with the plan: ``flag`` is ``"over"`` where it is more than 5 % above, and ``"under"``
    where bytes that were exact or measured are more than 5 % below. ``kv_groups`` counts the blocks of each attention
    window, ``pool`` is the device's memory pool as it stands, without waiting for the device.
    """
    executor = engine.executor
    report = measured_terms(engine)
    return {
        **report,
        "lines": compared(engine.ledger, report, page_bytes=engine.station.device.facts.granularity_bytes),
        "kv_groups": [_group(group) for group in executor.kv.groups],
        "pool": _pool(engine),
        "counters": executor.counters.to_dict(),
        "error_budget": executor.error_budget.left,
        "stopped": executor.stopped,
    }


def compared(ledger: Ledger, report: Mapping[str, Any], *, page_bytes: int = 0) -> list[dict[str, Any]]:
    """Every line of the ledger, the KV cache too, beside the ``terms`` and ``kv_cache`` of a report.

    A difference below ``page_bytes``, the device's page, is not flagged: lines are planned in whole pages, and what
    they don't fill is measured as fragmentation.
    """
    held = {term["name"]: (term["bytes"], term["peak_bytes"]) for term in report["terms"]}
    planned: dict[str, int] = {}
    basis: dict[str, set[str]] = {}
    for term in ledger.terms:
        planned[term.name] = planned.get(term.name, 0) + term.bytes
        basis.setdefault(term.name, set()).add(term.basis)
    lines = [
        _line(name, nbytes, *held.get(name, (0, 0)), page_bytes, seen=basis[name] <= set(_SEEN) and name in held)
        for name, nbytes in planned.items()
    ]
    lines += [_line(name, 0, *held[name], page_bytes, seen=False) for name in held if name not in planned]
    pool = report["kv_cache"]["bytes"]
    return [*lines, _line("kv_cache", ledger.kv_cache.bytes, pool, pool, page_bytes, seen=True)]


def _line(name: str, planned: int, now: int, peak: int, page_bytes: int, *, seen: bool) -> dict[str, Any]:
    flag = None
    if abs(peak - planned) < page_bytes:
        pass
    elif (peak - planned) * 100 > planned * FLAGGED_PERCENT:
        flag = "over"
    elif seen and (planned - peak) * 100 > planned * FLAGGED_PERCENT:
        flag = "under"
    return {
        "name": name,
        "planned_bytes": planned,
        "bytes": now,
        "peak_bytes": peak,
        "delta_bytes": peak - planned,
        "flag": flag,
    }


def _group(group: KVGroup) -> dict[str, Any]:
    return {
        "window_tokens": group.window_tokens,
        "blocks": group.num_blocks,
        "used_blocks": group.used_blocks,
        "free_blocks": group.free_blocks,
        "peak_used_blocks": group.peak_used_blocks,
    }


def _pool(engine: Engine) -> dict[str, int] | None:
    """None on devices without a pool of their own."""
    if engine.station.device.existing_pool is None:
        return None
    stats = engine.station.manager.pool_stats(sync=False)
    return {"reserved_bytes": stats.reserved, "used_bytes": stats.used, "free_bytes": stats.free}
