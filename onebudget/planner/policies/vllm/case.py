"""One vLLM plan's question, read once: settings by version, limits of a step, drafts, and what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from onebudget.errors import ConfigError
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.drafts import Draft
from onebudget.planner.policies.formats import WeightFormat, cache_bits, weight_format
from onebudget.planner.policies.layouts import refuse_layout
from onebudget.planner.policies.settings import check_settings, switch
from onebudget.planner.policies.versions import EngineVersion, read_version
from onebudget.planner.policies.vllm.defaults import Limits, find_limits
from onebudget.planner.policies.vllm.drafting import module_tables, rank_draft, read_draft, runs_newer_runner
from onebudget.planner.policies.weight_rules import Shard

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
    "speculative_config": "draft method, model, its ranks, and number of tokens",
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
_HALF_BITS = 16


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


def read_case(request: PlanRequest) -> Case:
    settings = check_settings("vllm", request.settings, KNOWN_SETTINGS)
    version = _core_setting(read_version("vllm", request.engine_version, request.as_of), settings)
    dims = dims_from_config(request.model.config, request.model.name)
    refuse_layout(request, dims)
    total = request.total_bytes or request.gpu.total_bytes
    draft = read_draft(settings, request, dims, version)
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    limits = find_limits(
        settings,
        dims,
        version,
        total,
        request.gpu.name,
        request.use,
        draft.tokens,
        quantised=kind.bits < _HALF_BITS,
        sm=request.gpu.sm,
    )
    if draft.tokens and not runs_newer_runner(draft, version):
        limits = replace(limits, v2_runner=False)
    return Case(
        request=request, settings=settings, version=version, dims=dims, kind=kind, limits=limits, draft=draft,
        total_bytes=total,
    )  # fmt: skip


def _core_setting(version: EngineVersion, settings: Mapping[str, Any]) -> EngineVersion:
    chosen = settings.get("VLLM_USE_V1")
    if chosen is None:
        return version
    core = "V1" if str(chosen) in ("1", "True", "true") else "V0"
    return replace(version, worker=core)


def cache_dtype(case: Case) -> str | None:
    """What was asked for the cache, as text."""
    given = case.settings.get("kv_cache_dtype")
    return str(given) if given is not None else case.request.kv_dtype


def cached_bits(case: Case) -> Fraction:
    """Bits of a cached element."""
    return cache_bits(cache_dtype(case), case.dims.element_bytes, case.dims.quantization)


def rank_shards(case: Case) -> list[Shard]:
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
                draft_layers=case.draft.modules if last else 0, draft_tables=module_tables(case) if last else 0,
                draft=rank_draft(case) if last else None, vision=vision and index == 0,
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
