"""Pools rebuilt from printed parts: each engine's equation, with what its log said in place of what we would plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accuracy_cases import ENGINE_ALIASES, request_for

from onebudget.errors import ConfigError
from onebudget.planner.policies.settings import check_settings
from onebudget.planner.policies.sglang import KNOWN_SETTINGS, default_fraction
from onebudget.planner.policies.versions import read_version
from onebudget.units import MIB

EXPLAINED = {
    "c058": "an unknown version that estimates graphs and does not charge them",
    "c222": "a fork with experts on the host and a fraction of its own",
}
_PRINTED_GIB = 0.0051
"""Half of the last digit, with two decimals."""


def rebuilt(case: Mapping[str, Any]) -> tuple[float, float] | None:
    """The pool from its printed parts, and the printed pool, both in GiB; None where a part was not printed."""
    engine = ENGINE_ALIASES.get(case["given"]["engine"], case["given"]["engine"])
    found = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}.get(engine)
    return found(case) if found else None


def _vllm(case: Mapping[str, Any]) -> tuple[float, float] | None:
    said = case["reported"]
    pool, budget = said.get("kv_pool_gib"), said.get("budget_gib")
    util = (case["given"].get("settings") or {}).get("gpu_memory_utilization")
    if pool is None or (budget is None and not (said.get("total_gib") and util)):
        return None
    start = budget if budget is not None else said["total_gib"] * util
    if said.get("consumed_weights_plus_nontorch_gib") is not None:
        parts = [said["consumed_weights_plus_nontorch_gib"], said.get("activation_peak_gib")]
    else:
        peak = said.get("activation_peak_gib")
        if peak is None and said.get("peak_torch_memory_gib"):
            peak = said["peak_torch_memory_gib"] - said["weights_gib"]
        parts = [said.get("weights_gib"), peak, said.get("non_torch_gib")]
        if said.get("graph_estimate_gib") and not said.get("activation_includes_graph_estimate"):
            parts.append(said["graph_estimate_gib"])
    if any(part is None for part in parts):
        return None
    return start - sum(parts), pool


def _sglang(case: Mapping[str, Any]) -> tuple[float, float] | None:
    """Free after loading, less the share of what was free before that is not static; states of hybrids included."""
    said = case["reported"]
    after, before = said.get("avail_after_load_gib"), said.get("avail_before_load_gib")
    if before is None and said.get("weights_gib") is not None and after is not None:
        before = after + said["weights_gib"]
    pool = said.get("kv_pool_gib")
    if pool is None and said.get("k_gib") is not None:
        pool = said["k_gib"] + said["v_gib"] + said.get("conv_state_gib", 0) + said.get("ssm_state_gib", 0)
    share = _share(case)
    if after is None or before is None or not pool or share is None:
        return None
    return after - before * (1 - share) - said.get("attention_workspace_gib", 0), pool


def _share(case: Mapping[str, Any]) -> float | None:
    """The fraction that was set, or the version's own for the card; None where neither can be told."""
    given = (case["given"].get("settings") or {}).get("mem_fraction_static")
    if given is not None:
        return float(given)
    try:
        _, request = request_for(case, config={})
    except ConfigError:
        return None
    settings = check_settings("sglang", request.settings, KNOWN_SETTINGS)
    version = read_version("sglang", request.engine_version, request.as_of)
    total = request.gpu.smi_bytes or request.total_bytes or request.gpu.total_bytes
    return default_fraction(settings, version, None, total // MIB, request)


def _trtllm(case: Mapping[str, Any]) -> tuple[float, float] | None:
    """The fraction of what is free, with the PyTorch backend after its peak is taken and its probe's cache returned."""
    said, settings = case["reported"], case["given"].get("settings") or {}
    share = float(settings.get("free_gpu_memory_fraction", 0.9))
    pool = said.get("kv_pool_gib")
    free = said.get("available_gib")
    if said.get("peak_gib") is not None and said.get("total_gib") is not None:
        free = said["total_gib"] - said["peak_gib"] + said.get("temporary_kv_gib", 0)
    if free is None or pool is None:
        return None
    return free * share, pool


def rebuild_misses(cases: Iterable[Mapping[str, Any]]) -> tuple[dict[str, int], list[str]]:
    """How many pools were rebuilt by engine, and those off by more than the larger of 0.5 % and 0.02 GiB."""
    counts: dict[str, int] = {}
    misses = []
    for case in cases:
        both = rebuilt(case)
        if both is None:
            continue
        engine = case["given"]["engine"]
        counts[engine] = counts.get(engine, 0) + 1
        mine, pool = both
        if abs(mine - pool) > max(0.005 * abs(pool), 0.02) + _PRINTED_GIB:
            why = EXPLAINED.get(case["id"], "not explained")
            misses.append(f"{case['id']}: {mine:.2f} for {pool:.2f} GiB ({why})")
    return counts, misses
