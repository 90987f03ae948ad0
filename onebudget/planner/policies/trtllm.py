"""TensorRT-LLM: a fraction of what is free once everything else exists. The PyTorch backend measures its peak first."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

from onebudget.budget.ledger import Ledger
from onebudget.budget.windows import window_blocks
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest, ProfileProvider
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.formats import WeightFormat, cache_bits, weight_format
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, Pool, build_ledger
from onebudget.planner.policies.settings import check_settings, fraction, whole
from onebudget.planner.policies.versions import EngineVersion, read_version
from onebudget.planner.policies.vllm.groups import cached_layers
from onebudget.planner.policies.vllm.outside import context_bytes
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank
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
    "kv_cache_manager": "v1, or v2 where windowed layers cost a fixed amount per request",
}


class TrtllmPolicy(EnginePolicy):
    """TensorRT-LLM with built engines and with the PyTorch backend."""

    name: ClassVar[str] = "trtllm"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest, profile: ProfileProvider | None = None) -> Ledger:
        del profile
        settings = check_settings("trtllm", request.settings, KNOWN_SETTINGS)
        version = read_version("trtllm", request.engine_version, request.as_of)
        dims = dims_from_config(request.model.config, request.model.name)
        return build_ledger(request, _outcome(request, settings, version, dims))


def is_pytorch(request: PlanRequest, settings: Mapping[str, Any], version: EngineVersion) -> bool:
    """The PyTorch backend is the default from 1.0 on."""
    chosen = str(settings.get("backend") or request.engine_version or "").lower()
    return "pytorch" in chosen or (version.at_least(1) and "tensorrt engine" not in chosen)


def _outcome(request: PlanRequest, settings: dict[str, Any], version: EngineVersion, dims: Dims) -> Outcome:
    total = request.total_bytes or request.gpu.total_bytes
    layout = request.layout
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    shard = Shard(
        tp=layout.tp,
        experts_over=layout.tp,
        whole_experts=layout.ep > 1,
        end_layer=ceil_div(len(dims.layers), layout.pp),
        has_head=layout.pp == 1,
    )
    used = _used(request, settings, dims, kind, shard, version, total, pytorch=is_pytorch(request, settings, version))
    left = total - sum(part.figure.bytes for part in used)
    share = fraction(settings, "free_gpu_memory_fraction", 0.9)
    pool, slope = _pool(request, settings, version, dims)
    cap = whole(settings, "max_tokens")
    limit = int(left * Fraction(str(share)))
    name, value = "free_gpu_memory_fraction", float(share)
    if cap is not None and cap * slope < limit:
        limit, name, value = ceil_div(cap, pool.tokens_per_block) * pool.tokens_per_block * slope, "max_tokens", cap
    spread = 0 if name == "max_tokens" else int(share * _spread(used))
    return Outcome(
        capacity_bytes=total,
        budget=Budget(limit, name, value, spread),
        charged=(),
        outside=tuple(used),
        pool=pool,
        engine="trtllm",
        version=str(version),
        notes=(
            f"TensorRT-LLM {version}, {'PyTorch' if is_pytorch(request, settings, version) else 'TensorRT'} backend"
            + ("" if version.given else " (no version was given: the newest before the plan's date)"),
            "free_gpu_memory_fraction is a share of what is free after weights, activations and buffers.",
        ),
    )


def _default_batch(version: EngineVersion) -> int:
    """Engines were built for 256 requests until 0.13 raised it."""
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
    wide, hidden = (5, 4) if kind.fused else (6, 6)
    width = max(dims.intermediate, dims.experts_per_token * dims.expert_intermediate)
    forward = tokens * (wide * width // shard.tp + hidden * dims.hidden)
    parts = [
        Part("context", "driver", context_bytes(request.gpu), "load"),
        Part("weights", "models", weights_on_rank(dims, kind, shard), "load"),
        Part("activations", "profile", Figure(forward, forward // 2, forward * 2, "modelled", f"{tokens} tokens")),
    ]
    others = max(total - request.free_bytes, 0) if request.free_bytes else 0
    if others:
        parts.append(Part("other_processes", "system", Figure.exact(others, "given"), "load"))
    if request.layout.tp > 1:
        parts.append(
            Part("communication", "ranks", Figure(GIB, GIB // 4, 2 * GIB, "modelled", "communicators"), "load")
        )
    if not pytorch:
        rows = batch * beams * dims.vocab * 4
        tables = 4 if version.at_least(0, 17) else 7
        why = f"decoder and runtime buffers: about {tables} tables of {batch} x {dims.vocab} x 4 B"
        parts.append(
            Part("fixed_workspace", "decoder", Figure(tables * rows, tables * rows // 3, 8 * rows, "modelled", why))
        )
    return parts


def _pool(request: PlanRequest, settings: dict[str, Any], version: EngineVersion, dims: Dims) -> tuple[Pool, int]:
    given = settings.get("kv_cache_dtype")
    bits = cache_bits(str(given) if given is not None else request.kv_dtype, dims.element_bytes, dims.quantization)
    layers = cached_layers(dims, bits, request.layout.tp, (dims.element_bytes, dims.element_bytes), 0)
    layers = layers[: ceil_div(len(layers), request.layout.pp)]
    block = whole(settings, "tokens_per_block", 32 if version.at_least(0, 17) else 64) or 32
    longest = whole(settings, "max_seq_len", dims.max_len or 4096) or 4096
    by_window: dict[int, int] = {}
    for layer in layers:
        window = min(layer.window or longest, longest)
        by_window[window] = by_window.get(window, 0) + layer.token_bytes
    by_window = {window: nbytes for window, nbytes in by_window.items() if nbytes}
    slope = max(sum(by_window.values()), 1)
    state = sum(layer.state_bytes for layer in layers) * (whole(settings, "max_batch_size", 2048) or 2048)

    def blocks(nbytes: int) -> int:
        usable = max(nbytes - state, 0)
        if len(by_window) > 1:
            return window_blocks(usable, by_window, block)[max(by_window)]
        return ceil_div(usable // slope, block)

    pool = Pool(
        tokens=lambda nbytes: blocks(nbytes) * block,
        blocks=blocks,
        tokens_per_block=block,
        bytes_per_token=slope,
        fixed_bytes=state,
        concurrency=lambda nbytes: blocks(nbytes) * block / longest,
        needed_bytes=block * slope + state,
    )
    return pool, slope
