"""vLLM: a fraction of the card's total, minus what the profiling run saw, is the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

from onebudget.budget.ledger import KVGroup, Ledger
from onebudget.errors import ConfigError
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest, ProfileProvider
from onebudget.planner.policies.compressed import CompressedShape
from onebudget.planner.policies.dims import Dims, LayerDims, dims_from_config
from onebudget.planner.policies.formats import WeightFormat, cache_bits, weight_format
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, Pool, build_ledger, pool_range
from onebudget.planner.policies.settings import check_settings, fraction, switch, whole
from onebudget.planner.policies.versions import EngineVersion, read_version
from onebudget.planner.policies.vllm.compressed import BLOCK_TOKENS as COMPRESSED_BLOCK
from onebudget.planner.policies.vllm.compressed import plan_compressed
from onebudget.planner.policies.vllm.defaults import Limits, find_limits
from onebudget.planner.policies.vllm.groups import (
    GroupPlan,
    cached_layers,
    plan_groups,
    printed_tokens,
    request_blocks,
)
from onebudget.planner.policies.vllm.outside import (
    compressed_kernels,
    context_bytes,
    graph_bytes,
    graphs_are_estimated,
    non_torch,
    penalty_buffers,
)
from onebudget.planner.policies.vllm.peak import profile_peak
from onebudget.planner.policies.weight_headers import rank_weights
from onebudget.planner.policies.weight_rules import Shard
from onebudget.units import ceil_div

KNOWN_SETTINGS: Mapping[str, str] = {
    "gpu_memory_utilization": "share of the card's total; 0.9, from 0.20 on 0.92",
    "max_model_len": "longest request in tokens; the model's own",
    "max_num_batched_tokens": "tokens of one step; by version and card",
    "max_num_seqs": "requests of one step; by version and card",
    "block_size": "tokens of a block; 16, raised by latent attention and hybrids",
    "kv_cache_dtype": "auto: the model's dtype",
    "kv_cache_memory_bytes": "the pool itself; the profile then decides nothing",
    "enforce_eager": "no graphs",
    "cudagraph_capture_sizes": "sizes to record",
    "max_cudagraph_capture_size": "largest size to record",
    "cudagraph_mode": "which kinds of graphs",
    "enable_prefix_caching": "reuse of prefixes; decides what a recurrent state costs",
    "enable_chunked_prefill": "split long prompts",
    "speculative_config": "draft method and number of tokens",
    "enable_lora": "adapters",
    "max_loras": "adapters on the card at once",
    "max_lora_rank": "rank the slots are made for",
    "limit_mm_per_prompt": "images, videos and sounds per request",
    "language_model_only": "leave encoders out",
    "skip_mm_profiling": "profile without encoders",
    "mamba_ssm_cache_dtype": "dtype of recurrent states",
    "mamba_cache_dtype": "dtype of convolution states",
    "disable_hybrid_kv_cache_manager": "charge windows as full attention",
    "swap_space": "host memory per card of the first core",
    "cpu_offload_gb": "weights kept on the host",
    "decode_context_parallel_size": "ranks that share the tokens of a request",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "charge estimated graphs",
    "VLLM_PP_LAYER_PARTITION": "layers of each pipeline stage",
    "VLLM_USE_V1": "which engine core, in versions that have both",
}


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens per step and the layers of the draft head that cache beside the model's."""

    tokens: int = 0
    layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything one plan reads, worked out once."""

    request: PlanRequest
    settings: dict[str, Any]
    version: EngineVersion
    dims: Dims
    kind: WeightFormat
    limits: Limits
    draft: Draft
    total_bytes: int


class VllmPolicy(EnginePolicy):
    """vLLM from 0.2 on, both engine cores and both runners."""

    name: ClassVar[str] = "vllm"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest, profile: ProfileProvider | None = None) -> Ledger:
        del profile
        case = _read(request)
        outcomes = [_stage(_on_card(case, index), shard) for index, shard in enumerate(_shards(case))]
        governing = min(outcomes, key=lambda outcome: outcome.pool.blocks(max(_left(outcome), 0)))
        return build_ledger(request, governing)


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


def _read(request: PlanRequest) -> Case:
    settings = check_settings("vllm", request.settings, KNOWN_SETTINGS)
    version = _core_setting(read_version("vllm", request.engine_version, request.as_of), settings)
    dims = dims_from_config(request.model.config, request.model.name)
    _refuse_layout(request, dims)
    total = request.total_bytes or request.gpu.total_bytes
    draft = _draft(settings, dims)
    limits = find_limits(settings, dims, version, total, request.gpu.name, request.use, draft.tokens)
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    return Case(
        request=request, settings=settings, version=version, dims=dims, kind=kind, limits=limits, draft=draft,
        total_bytes=total,
    )  # fmt: skip


def _core_setting(version: EngineVersion, settings: Mapping[str, Any]) -> EngineVersion:
    chosen = settings.get("VLLM_USE_V1")
    if chosen is None:
        return version
    core = "V1" if str(chosen) in ("1", "True", "true") else "V0"
    return EngineVersion(version.number, core, version.given, version.candidate)


def _refuse_layout(request: PlanRequest, dims: Dims) -> None:
    tp, pp = request.layout.tp, request.layout.pp
    if dims.heads % tp:
        raise ConfigError(
            f"tp = {tp} does not divide the {dims.heads} attention heads of the model.", field="tp", value=tp
        )
    if pp > len(dims.layers):
        raise ConfigError(f"pp = {pp} is more than the model's {len(dims.layers)} layers.", field="pp", value=pp)
    if tp * pp > request.n_gpus:
        raise ConfigError(f"tp {tp} x pp {pp} needs {tp * pp} GPUs, there are {request.n_gpus}.", field="n_gpus")


def _draft(settings: Mapping[str, Any], dims: Dims) -> Draft:
    given = settings.get("speculative_config")
    if not given:
        return Draft()
    config = dict(given) if isinstance(given, Mapping) else {"method": str(given)}
    method = str(config.get("method", "")).lower()
    tokens = int(config.get("num_speculative_tokens", 1) or 1)
    if "ngram" in method:
        return Draft(tokens)
    return Draft(tokens, 1)


def _shards(case: Case) -> list[Shard]:
    request, dims = case.request, case.dims
    layout = request.layout
    over = layout.tp * max(layout.dp, 1)
    counts = _stage_layers(case.settings, len(dims.layers), layout.pp)
    shards, start = [], 0
    vision = not switch(case.settings, "language_model_only", default=False)
    for index, count in enumerate(counts):
        last = index == len(counts) - 1
        shards.append(
            Shard(
                tp=layout.tp, experts_over=over, whole_experts=layout.ep > 1, first_layer=start,
                end_layer=start + count, has_embedding=index == 0, has_head=last,
                draft_layers=case.draft.layers if last else 0, vision=vision and index == 0,
                tiles="" if case.version.at_least(0, 12) else "marlin",  # the other kernel came with the wheel later
            )
        )  # fmt: skip
        start += count
    return shards


def _stage_layers(settings: Mapping[str, Any], layers: int, pp: int) -> list[int]:
    """Layers per stage: even, with what remains going to the stages before the last."""
    given = settings.get("VLLM_PP_LAYER_PARTITION")
    if given:
        parts = given if isinstance(given, (list, tuple)) else str(given).split(",")
        counts = [int(part) for part in parts]
        if len(counts) != pp or sum(counts) != layers:
            allowed = f"{pp} numbers that sum to {layers}"
            raise ConfigError.for_field("VLLM_PP_LAYER_PARTITION", given, allowed)
        return counts
    counts = [layers // pp] * pp
    for offset in range(layers % pp):
        counts[max(pp - 2 - offset, 0)] += 1
    return counts


def _stage(case: Case, shard: Shard) -> Outcome:
    version, request, limits, dims = case.version, case.request, case.limits, case.dims
    util = fraction(case.settings, "gpu_memory_utilization", 0.92 if version.at_least(0, 20) else 0.9)
    share = case.total_bytes * Fraction(str(util))
    limit = math.ceil(share) if version.at_least(0, 20) else int(share)
    budget = Budget(
        limit, "gpu_memory_utilization", util, int(util * _total_spread(request, case.total_bytes)) + limit // 100
    )
    weights = rank_weights(request, dims, case.kind, shard)
    ranks = request.layout.tp * request.layout.pp
    outside = non_torch(version, limits.worker, request.gpu, request.layout.tp, ranks)
    graphs = graph_bytes(limits, dims, request.layout.tp)
    penalties = penalty_buffers(version, limits, dims)
    peak = profile_peak(dims, case.kind, shard, limits, version, sm=request.gpu.sm, encodes=_encodes(case, shard))
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
        pool=_pool(case, shard), engine="vllm", version=str(version), notes=_notes(case), warnings=_warnings(case),
        free_bytes=request.free_bytes,
    )  # fmt: skip


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


def _pool(case: Case, shard: Shard) -> Pool:
    if case.dims.compressed is not None:
        return _compressed_pool(case, case.dims.compressed)
    plan = _groups(case, shard)
    limits, version = case.limits, case.version
    aligned = limits.prefix_caching and case.dims.is_hybrid
    in_flight = limits.batch_tokens * (2 if version.at_least(0, 26) else 1)  # batches overlap, and both may hold blocks
    per_request = request_blocks(
        plan, limits.max_len, in_flight, aligned_states=aligned, draft_tokens=case.draft.tokens
    )
    alone = request_blocks(
        plan, limits.max_len, limits.batch_tokens, aligned_states=aligned, draft_tokens=case.draft.tokens
    )
    dcp = whole(case.settings, "decode_context_parallel_size", 1) or 1
    if len(_shards(case)) > 1 and not version.at_least(0, 17):  # one stage is charged with the layers of all
        per_request = ceil_div(per_request * len(case.dims.layers), max(sum(g.layers for g in plan.groups), 1))
    needed = (per_request + (1 if version.at_least(0, 29) else 0)) * plan.block_bytes

    def blocks(nbytes: int) -> int:
        return max(nbytes, 0) // plan.block_bytes

    def tokens(nbytes: int) -> int:
        return printed_tokens(plan, blocks(nbytes), per_request, limits.max_len, version) * dcp

    return Pool(
        tokens=tokens,
        blocks=blocks,
        tokens_per_block=plan.block_tokens,
        bytes_per_token=ceil_div(plan.block_bytes * _growing(plan), plan.block_tokens),
        fixed_bytes=sum(1 for group in plan.groups if group.kind == "state") * plan.block_bytes,
        concurrency=lambda nbytes: blocks(nbytes) / per_request,
        groups=lambda nbytes: _ledger_groups(plan, nbytes),
        needed_bytes=needed if limits.worker == "V1" else 1,
        token_factors=_unknown_modes(case, plan, per_request, alone),
    )


def _unknown_modes(case: Case, plan: GroupPlan, blocks: int, alone: int) -> tuple[float, float]:
    """How far tokens may be off because a log rarely says whether batches overlap, or which version's default for
    reusing states of hybrids holds. The token line is in longest requests from 0.20 on only."""
    if not case.version.at_least(0, 20):
        return 1.0, 1.0
    limits, costs = case.limits, [blocks, alone]
    if case.dims.is_hybrid and not case.version.given and "enable_prefix_caching" not in case.settings:
        costs += [
            request_blocks(
                plan, limits.max_len, limits.batch_tokens, aligned_states=mode, draft_tokens=case.draft.tokens
            )
            for mode in (False, True)
        ]
    return blocks / max(costs), blocks / min(costs)


def _compressed_pool(case: Case, shape: CompressedShape) -> Pool:
    limits = case.limits
    plan, alone = (
        plan_compressed(
            shape, case.dims.head_dim, case.version, length=limits.max_len, batch_tokens=tokens,
            draft_layers=case.draft.layers,
        )
        for tokens in (limits.batch_tokens, limits.batch_tokens // 2)
    )  # fmt: skip

    def blocks(nbytes: int) -> int:
        return max(nbytes, 0) // plan.block_bytes

    return Pool(
        tokens=lambda nbytes: blocks(nbytes) * limits.max_len // plan.request_blocks,
        blocks=blocks,
        tokens_per_block=COMPRESSED_BLOCK,
        bytes_per_token=ceil_div(plan.block_bytes, COMPRESSED_BLOCK),
        fixed_bytes=(plan.needed_blocks - ceil_div(limits.max_len, COMPRESSED_BLOCK)) * plan.block_bytes,
        concurrency=lambda nbytes: blocks(nbytes) / plan.request_blocks,
        groups=lambda nbytes: _ledger_groups(plan.as_groups(), nbytes),
        needed_bytes=plan.needed_blocks * plan.block_bytes,
        token_factors=(1.0, plan.request_blocks / alone.request_blocks),
    )


def _growing(plan: GroupPlan) -> int:
    return sum(1 for group in plan.groups if group.kind == "full") or 1


def _ledger_groups(plan: GroupPlan, nbytes: int) -> list[KVGroup]:
    blocks = nbytes // plan.block_bytes
    return [
        KVGroup(
            f"{group.kind}{index}", nbytes // len(plan.groups), blocks // len(plan.groups),
            plan.block_bytes // group.block_tokens, group.window, group.layers,
        )
        for index, group in enumerate(plan.groups)
    ]  # fmt: skip


def _groups(case: Case, shard: Shard) -> GroupPlan:
    dims, settings, version = case.dims, case.settings, case.version
    bits = cache_bits(_cache_dtype(case), dims.element_bytes, dims.quantization)
    stage = _with_layers(dims, shard, case.draft.layers if shard.has_head else 0)
    layers = cached_layers(
        stage, bits, shard.tp, _state_elements(case), case.draft.tokens, latent_cache=version.at_least(0, 7)
    )
    if not layers:
        raise ConfigError("a pipeline stage without any cached layer can't be planned.", field="pp")
    windows = case.limits.worker == "V1" and version.at_least(0, 9)
    hybrid = windows and not switch(settings, "disable_hybrid_kv_cache_manager", default=False)
    block = 64 if dims.is_latent and (dims.is_hybrid or version.at_least(0, 8)) else 16
    if not dims.is_hybrid:
        block = whole(settings, "block_size", block) or block
    return plan_groups(layers, version, block_tokens=block, hybrid=hybrid)


def _with_layers(dims: Dims, shard: Shard, extra: int) -> Dims:
    layers = dims.layers[shard.first_layer : shard.end_layer]
    if extra:
        full: LayerDims = next((layer for layer in dims.layers if layer.kind == "full"), dims.layers[-1])
        layers += (full,) * extra

    return replace(dims, layers=layers)


def _state_elements(case: Case) -> tuple[int, int]:
    """Element sizes of convolution window and state: settings, what the checkpoint asks for, or the model's own."""
    names = {"float32": 4, "float16": 2, "bfloat16": 2}
    own = case.dims.element_bytes
    asked = case.dims.state.matrix_bytes if case.dims.state else None
    if asked is None and case.dims.family.startswith("qwen3_5"):
        asked = 4  # the family's configs ask for 32 bits; partial ones leave it out
    ssm = names.get(str(case.settings.get("mamba_ssm_cache_dtype")), asked or own)
    return names.get(str(case.settings.get("mamba_cache_dtype")), own), ssm


def _cache_dtype(case: Case) -> str | None:
    given = case.settings.get("kv_cache_dtype")
    return str(given) if given is not None else case.request.kv_dtype


def _notes(case: Case) -> tuple[str, ...]:
    limits = case.limits
    return (
        f"vLLM {case.version}, {limits.worker} core"
        + (", newer runner" if limits.v2_runner else "")
        + ("" if case.version.given else " (no version was given: the newest before the plan's date)"),
        "gpu_memory_utilization is a share of the card's total, whoever else uses it.",
        f"The profile runs {limits.batch_tokens} tokens in {min(limits.batch_requests, limits.batch_tokens)} requests.",
    )


def _warnings(case: Case) -> tuple[str, ...]:
    if case.limits.v2_runner and not case.version.at_least(0, 27):
        return ("Penalty tables of the newer runner are not charged by this version: real use exceeds the budget.",)
    return ()
