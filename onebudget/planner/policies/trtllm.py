"""TensorRT-LLM: a fraction of what is free once everything else exists. The PyTorch backend measures its peak first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

from onebudget.budget.ledger import Ledger
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.drafts import Draft, draft_weights
from onebudget.planner.policies.formats import WeightFormat, cache_bits, weight_format
from onebudget.planner.policies.layouts import refuse_layout
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, build_ledger
from onebudget.planner.policies.settings import check_settings, fraction, whole
from onebudget.planner.policies.trtllm_drafts import has_own_manager, read_draft
from onebudget.planner.policies.trtllm_pools import WindowPools, by_window, is_second
from onebudget.planner.policies.versions import EngineVersion, read_version
from onebudget.planner.policies.vllm.groups import cached_layers
from onebudget.planner.policies.vllm.outside import context_bytes
from onebudget.planner.policies.weight_headers import rank_weights
from onebudget.planner.policies.weight_rules import Shard
from onebudget.planner.unified import free_at_start, system_notes
from onebudget.units import GIB, ceil_div

KNOWN_SETTINGS: Mapping[str, str] = {
    "free_gpu_memory_fraction": "share of what is free after everything else exists; 0.9",
    "max_tokens": "most tokens of the pool; the smaller of both wins",
    "max_seq_len": "longest request in tokens; the model's own",
    "max_num_tokens": "tokens of one step; 8192",
    "max_batch_size": "requests of one step; 2048",
    "max_beam_width": "beams; 1",
    "tokens_per_block": "tokens of a block; 32, in engines until 0.16 64",
    "kv_cache_dtype": "auto: the model's dtype",
    "backend": "pytorch or tensorrt; by version",
    "host_cache_size": "bytes of host memory for evicted blocks, per rank and cache manager",
    "speculative_config": "draft method, its checkpoint and how much it drafts",
    "max_attention_window": "tokens that layers look back, a list repeated over them; the model's own windows",
    "kv_cache_manager": "v1, or v2 where windowed layers cost a fixed amount per request",
}


class TrtllmPolicy(EnginePolicy):
    """TensorRT-LLM with built engines and with the PyTorch backend."""

    name: ClassVar[str] = "trtllm"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest) -> Ledger:
        settings = check_settings("trtllm", request.settings, KNOWN_SETTINGS)
        version = read_version("trtllm", request.engine_version, request.as_of)
        dims = dims_from_config(request.model.config, request.model.name)
        refuse_layout(request, dims)
        return build_ledger(request, _outcome(request, settings, version, dims))


def is_pytorch(request: PlanRequest, settings: Mapping[str, Any], version: EngineVersion) -> bool:
    """The PyTorch backend is the default from 1.0 on."""
    chosen = str(settings.get("backend") or request.engine_version or "").lower()
    return "pytorch" in chosen or (version.at_least(1) and "tensorrt engine" not in chosen)


def _outcome(request: PlanRequest, settings: dict[str, Any], version: EngineVersion, dims: Dims) -> Outcome:
    total = request.total_bytes or request.gpu.total_bytes
    layout = request.layout
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    draft = read_draft(settings, request, dims, version)
    shard = Shard(
        tp=layout.tp,
        experts_over=layout.tp,
        whole_experts=layout.ep > 1,
        end_layer=ceil_div(len(dims.layers), layout.pp),
        has_head=layout.pp == 1,
        draft_layers=draft.modules,
        draft=draft_weights(draft, dims, kind, own_tables=False),
    )
    used = _used(request, settings, dims, kind, shard, version, total, pytorch=is_pytorch(request, settings, version))
    left = total - sum(part.figure.bytes for part in used)
    share = fraction(settings, "free_gpu_memory_fraction", 0.9)
    pools = _pools(request, settings, version, dims, draft)
    cap = whole(settings, "max_tokens")
    limit = int(left * Fraction(str(share)))
    name, value = "free_gpu_memory_fraction", float(share)
    if cap is not None and pools.bytes_for(cap) <= limit:
        limit, name, value = pools.bytes_for(cap), "max_tokens", cap
    spread = 0 if name == "max_tokens" else int(share * _spread(used))
    return Outcome(
        capacity_bytes=total,
        budget=Budget(limit, name, value, spread),
        charged=(),
        outside=tuple(used),
        pool=pools.pool(limit),
        engine="trtllm",
        version=str(version),
        notes=(
            f"TensorRT-LLM {version}, {'PyTorch' if is_pytorch(request, settings, version) else 'TensorRT'} backend"
            + ("" if version.given else " (no version was given: the newest before the plan's date)"),
            "free_gpu_memory_fraction is a share of what is free after weights, activations and buffers.",
            *pools.notes(limit),
            *system_notes(request),
        ),
        warnings=pools.warnings(limit),
    )


def _default_batch(version: EngineVersion) -> int:
    """Engines were built for 256 requests until 0.13 raised it, and for one until 0.10 (from memory of the build tool's
    help, not checked; the one log of 0.8 in the even half says one)."""
    if not version.at_least(0, 11):
        return 1
    return 2048 if version.at_least(0, 13) and not (version.number[:2] == (0, 13) and version.candidate) else 256


def _spread(parts: list[Part]) -> float:
    widths = [(part.figure.high_bytes - part.figure.low_bytes) / 2 for part in parts]
    return float(sum(width**2 for width in widths) ** 0.5)


def _used(
    request: PlanRequest,
    settings: dict[str, Any],
    dims: Dims,
    kind: WeightFormat,
    shard: Shard,
    version: EngineVersion,
    total: int,
    *,
    pytorch: bool,
) -> list[Part]:
    """Everything that exists before the pool is sized."""
    tokens = whole(settings, "max_num_tokens", 8192) or 8192
    batch = whole(settings, "max_batch_size", _default_batch(version)) or 1
    beams = whole(settings, "max_beam_width", 1) or 1
    weights = rank_weights(request, dims, kind, shard)
    if pytorch:
        forward = _profiled(dims, kind, shard, tokens)
    else:
        forward = _execution_context(dims, shard, tokens, batch)
        weights = rank_weights(request, replace(dims, tied=False), kind, shard)  # a built engine stores both tables
    parts = [
        Part("context", "driver", context_bytes(request.gpu), "load"),
        Part("weights", "models", weights, "load"),
        Part("activations", "profile", forward),
    ]
    free = free_at_start(request)
    others = max(total - free, 0) if free else 0
    if others:
        parts.append(Part("other_processes", "system", Figure.exact(others, "given"), "load"))
    if request.layout.tp > 1:
        parts.append(
            Part("communication", "ranks", Figure(GIB, GIB // 4, 2 * GIB, "modelled", "communicators"), "load")
        )
    if not pytorch:
        parts.append(Part("fixed_workspace", "decoder", _decoder_tables(dims, version, batch * beams)))
        parts.append(Part("runtime", "driver", _runtime(version), "load"))
    return parts


def _runtime(version: EngineVersion) -> Figure:
    """The runtime's own memory: what logs leave unexplained beside context, weights, execution context and decoder. In
    the even half 0.2 GiB with 0.8.0, 1.1 GiB with 0.13 and 0.75 GiB with 0.14 or 0.15."""
    best, high = (92, 130) if version.at_least(0, 13) else (20, 60)
    return Figure(
        GIB * best // 100, GIB * best // 1000, GIB * high // 100, "modelled", "runtime, libraries and tactics"
    )


def _profiled(dims: Dims, kind: WeightFormat, shard: Shard, tokens: int) -> Figure:
    wide, hidden = (5, 4) if kind.fused else (6, 6)
    width = max(dims.intermediate, dims.experts_per_token * dims.expert_intermediate)
    forward = tokens * (wide * width // shard.tp + hidden * dims.hidden)
    return Figure(forward, forward // 2, forward * 2, "modelled", f"{tokens} tokens")


def _execution_context(dims: Dims, shard: Shard, tokens: int, batch: int) -> Figure:
    """The static activations of a built engine: logits of every request in 16 bits, and two wide and two narrow rows
    for every token (to the megabyte what one log of the even half prints)."""
    width = max(dims.intermediate, dims.experts_per_token * dims.expert_intermediate) // shard.tp
    nbytes = batch * dims.vocab * 2 + tokens * 4 * (width + dims.hidden)
    why = f"execution context for {batch} requests and {tokens} tokens"
    return Figure(nbytes, nbytes // 4, nbytes * 13 // 10, "modelled", why)  # what it was built for is rarely known


def _decoder_tables(dims: Dims, version: EngineVersion, seats: int) -> Figure:
    """Decoder and runtime buffers, in tables of seats x vocabulary x 4 B: 6.8 in the one log that prints them (even
    half, 0.14 or 0.15), fewer since."""
    table = seats * dims.vocab * 4
    best = 4 * table if version.at_least(0, 17) else table * 677 // 100
    why = f"decoder and runtime buffers, tables of {seats} x {dims.vocab} x 4 B"
    return Figure(best, table // 2, 8 * table, "modelled", why)


def _pools(
    request: PlanRequest, settings: dict[str, Any], version: EngineVersion, dims: Dims, draft: Draft
) -> WindowPools:
    given = settings.get("kv_cache_dtype")
    bits = cache_bits(str(given) if given is not None else request.kv_dtype, dims.element_bytes, dims.quantization)
    layers = cached_layers(dims, bits, request.layout.tp, (dims.element_bytes, dims.element_bytes), 0)
    layers = layers[: ceil_div(len(layers), request.layout.pp)]
    longest = whole(settings, "max_seq_len", dims.max_len or 4096) or 4096
    found = by_window(layers, longest, settings.get("max_attention_window"))
    sizes = {window: sum(layer.token_bytes for layer in each) for window, each in found.items()}
    counts = {window: len(each) for window, each in found.items()}
    own = cached_layers(
        replace(draft.dims or dims, layers=draft.layers), bits, draft.ranks, (dims.element_bytes, dims.element_bytes), 0
    )
    drafted = sum(layer.token_bytes for layer in own)
    if drafted and not has_own_manager(draft, settings.get("speculative_config")):
        sizes[longest] = sizes.get(longest, 0) + drafted
        counts[longest] = counts.get(longest, 0) + len(own)
        drafted = 0
    batch = whole(settings, "max_batch_size", 2048) or 2048
    return WindowPools(
        bytes_per_token=sizes, layers=counts, longest=longest,
        block_tokens=whole(settings, "tokens_per_block", 32 if version.at_least(0, 17) else 64) or 32,
        max_batch_size=batch, state_bytes=sum(layer.state_bytes for layer in layers) * batch, drafted_bytes=drafted,
        v2=is_second(settings.get("kv_cache_manager")),
    )  # fmt: skip
