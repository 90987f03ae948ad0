"""vLLM: a fraction of the card's total, minus what the profiling run saw, is the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, build_ledger, pool_range, widened
from onebudget.planner.policies.settings import fraction, size_bytes, switch, whole
from onebudget.planner.policies.versions import recent
from onebudget.planner.policies.vllm.case import KNOWN_SETTINGS, Case, rank_shards, read_case
from onebudget.planner.policies.vllm.chosen import reserved_room
from onebudget.planner.policies.vllm.outside import (
    compressed_kernels,
    context_bytes,
    graph_bytes,
    graphs_are_estimated,
    non_torch,
    penalty_buffers,
)
from onebudget.planner.policies.vllm.peak import profile_peak
from onebudget.planner.policies.vllm.pool import pool_of
from onebudget.planner.policies.weight_headers import rank_weights
from onebudget.planner.policies.weight_rules import Shard
from onebudget.planner.unified import free_at_start, system_notes
from onebudget.units import GIB, format_bytes


class VllmPolicy(EnginePolicy):
    """vLLM from 0.2 on, both engine cores and both runners."""

    name: ClassVar[str] = "vllm"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest) -> Ledger:
        return _plan(read_case(request))

    def widened(self, request: PlanRequest, ledger: Ledger) -> Ledger:
        if not read_case(request).version.is_open:
            return ledger
        others = [_plan(read_case(replace(request, engine_version=version))) for version in recent(self.name)]
        return widened(ledger, others)


def _plan(case: Case) -> Ledger:
    outcomes = [_stage(_on_card(case, index), shard) for index, shard in enumerate(rank_shards(case))]
    governing = min(outcomes, key=lambda outcome: outcome.pool.blocks(max(_left(outcome), 0)))
    return build_ledger(case.request, governing)


def _left(outcome: Outcome) -> int:
    return pool_range(outcome.budget, outcome.charged)[0]


def _on_card(case: Case, stage: int) -> Case:
    totals = case.request.stage_total_bytes
    if totals is None:
        return case
    if len(totals) != case.request.layout.pp:
        raise ConfigError.for_field(
            "stage_total_bytes", totals, f"one total for each of {case.request.layout.pp} stages"
        )
    return replace(case, total_bytes=totals[stage])


def _stage(case: Case, shard: Shard) -> Outcome:
    version, request, limits, dims = case.version, case.request, case.limits, case.dims
    util = fraction(case.settings, "gpu_memory_utilization", 0.92 if version.at_least(0, 20) else 0.9)
    share = case.total_bytes * Fraction(str(util))
    limit = math.ceil(share) if version.at_least(0, 20) else int(share)
    budget = Budget(
        limit, "gpu_memory_utilization", util, int(util * _total_spread(request, case.total_bytes)) + limit // 100
    )
    weights = _on_device(rank_weights(request, dims, case.kind, shard), case)
    ranks = request.layout.tp * request.layout.pp
    outside = non_torch(version, limits.worker, request.gpu, request.layout.tp, ranks)
    graphs = graph_bytes(limits, dims, request.layout.tp)
    penalties = penalty_buffers(version, limits, dims)
    peak = profile_peak(
        dims, case.kind, shard, limits, version, sm=request.gpu.sm, encodes=_encodes(case, shard),
        room=reserved_room(case, shard.tp), draft=case.draft,
    )  # fmt: skip
    charged = [
        Part("weights", "models", weights, "load"),
        Part("lora", "models", _lora(case, shard), "load"),
        Part("activations", "profile", peak),
        Part("communication" if ranks > 1 else "context", "driver", outside),
        Part("fixed_workspace", "attention", compressed_kernels(dims)),
    ]
    beside = [Part("context", "driver", context_bytes(request.gpu), "load")]
    charges_graphs = graphs_are_estimated(version, limits) and switch(
        case.settings, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", default=True
    )
    (charged if charges_graphs else beside).append(Part("graphs", "graphs", graphs, "capture"))
    (charged if version.at_least(0, 27) else beside).append(Part("penalty_workspace", "sampler", penalties, "load"))
    given = whole(case.settings, "kv_cache_memory_bytes")
    if given:
        budget = Budget(given + sum(part.figure.bytes for part in charged), "kv_cache_memory_bytes", given)
        charged = [_fixed(part) for part in charged]
    return Outcome(
        capacity_bytes=case.total_bytes, budget=budget, charged=tuple(charged), outside=tuple(beside),
        pool=pool_of(case, shard), engine="vllm", version=str(version),
        notes=(*_notes(case), *system_notes(request, util)), warnings=_warnings(case),
        free_bytes=free_at_start(request),
    )  # fmt: skip


def _on_device(weights: Figure, case: Case) -> Figure:
    """Without what ``cpu_offload_gb`` keeps on the host, which is in GiB and per rank."""
    kept_away = size_bytes(case.settings, "cpu_offload_gb", GIB)
    if not kept_away:
        return weights
    best, low, high = (max(nbytes - kept_away, 0) for nbytes in (weights.bytes, weights.low_bytes, weights.high_bytes))
    return Figure(best, low, high, weights.basis, f"{weights.why}; {format_bytes(kept_away)} more on the host")


def _encodes(case: Case, shard: Shard) -> bool:
    """Whether the profile runs encoders: not on later stages, nor where every kind of input is limited to none."""
    limits = case.settings.get("limit_mm_per_prompt")
    none = isinstance(limits, Mapping) and bool(limits) and not any(limits.values())
    return shard.vision and not none and not switch(case.settings, "skip_mm_profiling", default=False)


def _fixed(part: Part) -> Part:
    return Part(part.name, part.owner, Figure.exact(part.figure.bytes, part.figure.why, "modelled"), part.phase)


def _total_spread(request: PlanRequest, total: int) -> int:
    """Drivers differ by about 0.1 GiB in what they report; a total that was given is taken as it is."""
    return 0 if request.total_bytes else max(total // 400, request.gpu.total_error_bytes)


def _lora(case: Case, shard: Shard) -> Figure:
    """Slots for adapters beside every linear layer: rank times the sum of widths in and out."""
    if not switch(case.settings, "enable_lora", default=False):
        return Figure.exact(0)
    dims = case.dims
    slots = whole(case.settings, "max_loras", 1) or 1
    rank = whole(case.settings, "max_lora_rank", 16) or 16
    widths = 4 * dims.hidden + (dims.heads + dims.kv_heads) * 2 * dims.head_dim // shard.tp
    widths += 3 * (dims.hidden + dims.intermediate // shard.tp)
    nbytes = slots * rank * widths * 2 * len(dims.layers)
    return Figure(nbytes, nbytes // 2, nbytes * 3 // 2, "modelled", f"{slots} slots of rank {rank}")


def _notes(case: Case) -> tuple[str, ...]:
    limits = case.limits
    return (
        f"vLLM {case.version}, {limits.worker} core"
        + (", newer runner" if limits.v2_runner else "")
        + ("" if case.version.given else f" (no version was given: {_unnamed(case)})"),
        "gpu_memory_utilization is a share of the card's total, whoever else uses it.",
        f"The profile runs {limits.batch_tokens} tokens in {min(limits.batch_requests, limits.batch_tokens)} requests.",
    )


def _unnamed(case: Case) -> str:
    if case.version.is_open:
        return "the newest, and the cache's range spans those of half a year"
    return "the newest before the plan's date"


def _warnings(case: Case) -> tuple[str, ...]:
    if case.limits.v2_runner and not case.version.at_least(0, 27):
        return ("Penalty tables of the newer runner are not charged by this version: real use exceeds the budget.",)
    return ()
