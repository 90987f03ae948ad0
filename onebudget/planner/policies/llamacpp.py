"""llama.cpp: no fraction. Buffers are what the settings make them, and one ledger stands for all cards together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from onebudget.budget.ledger import Ledger
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest, ProfileProvider
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.formats import cache_bits, weight_format
from onebudget.planner.policies.layouts import refuse_layout
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, Pool, build_ledger
from onebudget.planner.policies.settings import check_settings, switch, whole
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.vllm.groups import cached_layers
from onebudget.planner.policies.weight_headers import rank_weights
from onebudget.planner.policies.weight_rules import Shard
from onebudget.units import GIB, align_up

KNOWN_SETTINGS: Mapping[str, str] = {
    "n_ctx": "tokens of the cache; the tools take the model's length",
    "n_batch": "tokens of a logical batch; 2048",
    "n_ubatch": "tokens of a physical batch; 512",
    "n_seq_max": "sequences; 1",
    "n_gpu_layers": "layers on the cards; all",
    "flash_attn": "attention without the table of scores; on where it works",
    "swa_full": "windowed layers cache everything",
    "kv_unified": "sequences share one cache",
    "type_k": "format of cached keys; f16",
    "type_v": "format of cached values; f16",
}
_PAD = 256
_PIPELINE_COPIES = 4


class LlamacppPolicy(EnginePolicy):
    """llama.cpp's buffers."""

    name: ClassVar[str] = "llamacpp"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest, profile: ProfileProvider | None = None) -> Ledger:
        del profile
        settings = check_settings("llamacpp", request.settings, KNOWN_SETTINGS)
        dims = dims_from_config(request.model.config, request.model.name)
        refuse_layout(request, dims)
        return build_ledger(request, _outcome(request, settings, dims))


def kv_bytes(dims: Dims, settings: Mapping[str, Any], kv_dtype: str | None, length: int) -> int:
    """Cells times the widths of keys and values; windowed layers keep the window and one physical batch."""
    bits = cache_bits(str(settings.get("type_k") or kv_dtype or "f16"), 2, None)
    sequences = whole(dict(settings), "n_seq_max", 1) or 1
    ubatch = whole(dict(settings), "n_ubatch", 512) or 512
    whole_windows = switch(settings, "swa_full", default=True)
    total = 0
    for layer in cached_layers(dims, bits, 1, (4, 4), 0):
        if layer.kind == "state":
            total += sequences * layer.state_bytes
            continue
        cells = align_up(length, _PAD)
        if layer.window and not whole_windows:
            cells = min(cells, align_up(layer.window + ubatch, _PAD))
        total += cells * layer.token_bytes
    return total


def compute_bytes(dims: Dims, settings: dict[str, Any], length: int, copies: int) -> int:
    """A card's scratch: logits and embeddings of a physical batch, or, without flash attention, the scores."""
    ubatch = whole(settings, "n_ubatch", 512) or 512
    if switch(settings, "flash_attn", default=True):
        nbytes = ubatch * dims.vocab * 4 + ubatch * dims.hidden * 4
    else:
        nbytes = dims.heads * length * ubatch * 4 + 4 * length * ubatch + 16 * dims.hidden * ubatch
    return nbytes * 4 // 3 if copies > 1 else nbytes


def _outcome(request: PlanRequest, settings: dict[str, Any], dims: Dims) -> Outcome:
    cards = request.n_gpus
    total = (request.total_bytes or request.gpu.total_bytes) * cards
    length = whole(settings, "n_ctx", dims.max_len or 4096) or dims.max_len or 4096
    cache = kv_bytes(dims, settings, request.kv_dtype, length)
    copies = _PIPELINE_COPIES if cards > 1 else 1
    compute = compute_bytes(dims, settings, length, copies) * cards
    layers = whole(settings, "n_gpu_layers", len(dims.layers)) or 0
    shard = Shard(end_layer=min(layers, len(dims.layers)), has_embedding=False)
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    weights = rank_weights(request, replace(dims, max_len=0), kind, shard)  # no rotary table is kept
    context = Figure(
        cards * GIB * 45 // 100, cards * GIB * 3 // 10, cards * GIB * 6 // 10, "modelled", "driver, cuBLAS"
    )
    parts = (
        Part("weights", "models", weights, "load"),
        Part(
            "activations",
            "graphs",
            Figure(compute, compute * 8 // 10, compute * 13 // 10, "modelled", "compute buffers"),
        ),
    )
    needed = cache + sum(part.figure.bytes for part in parts)
    fits = needed + context.bytes <= total
    limit = needed if fits else total - context.bytes
    slope = cache // max(length, 1)

    def tokens(nbytes: int) -> int:
        return length if nbytes >= cache else nbytes // max(slope, 1)

    return Outcome(
        capacity_bytes=total,
        budget=Budget(limit, "n_ctx", length),
        charged=tuple(
            Part(part.name, part.owner, Figure.exact(part.figure.bytes, part.figure.why, "modelled"), part.phase)
            for part in parts
        ),
        outside=(Part("context", "driver", context, "load"),),
        pool=Pool(
            tokens=tokens,
            blocks=tokens,
            tokens_per_block=1,
            bytes_per_token=slope,
            concurrency=lambda nbytes: tokens(nbytes) / max(length, 1),
            needed_bytes=cache,
        ),
        engine="llamacpp",
        version=str(read_version("llamacpp", request.engine_version, request.as_of)),
        notes=("No fraction: weights, cache and compute buffers are what the settings make them, all cards together.",),
    )
