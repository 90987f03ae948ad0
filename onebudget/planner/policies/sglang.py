"""SGLang: what is free after loading, less a share of what was free before, is the KV cache. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from onebudget.budget.ledger import Ledger
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.drafts import Draft
from onebudget.planner.policies.formats import WeightFormat, cache_bits, weight_format
from onebudget.planner.policies.indexer import PACKED_LATENT
from onebudget.planner.policies.layouts import refuse_layout
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, Pool, build_ledger
from onebudget.planner.policies.settings import check_settings, fraction, switch, whole
from onebudget.planner.policies.sglang_drafts import (
    SEATS,
    draft_cell_bytes,
    head_weights,
    is_charged,
    read_draft,
    reserve_mib,
)
from onebudget.planner.policies.sglang_scratch import SIZE_SETTING, attention_scratch
from onebudget.planner.policies.versions import EngineVersion, read_version
from onebudget.planner.policies.vllm.groups import CachedLayer, cached_layers
from onebudget.planner.policies.vllm.outside import LINKED_BANDWIDTH as _LINKED_BANDWIDTH
from onebudget.planner.policies.vllm.outside import context_bytes
from onebudget.planner.policies.weight_headers import rank_weights
from onebudget.planner.policies.weight_rules import Shard
from onebudget.planner.unified import free_at_start, system_notes
from onebudget.units import GIB, MIB, align_down, align_up

KNOWN_SETTINGS: Mapping[str, str] = {
    "mem_fraction_static": "share of the memory free before loading that weights and cache may take; by card",
    "context_length": "longest request in tokens; the model's own",
    "max_total_tokens": "most tokens of the pool",
    "max_running_requests": "requests at once",
    "chunked_prefill_size": "tokens of one prefill step; by card",
    "max_prefill_tokens": "tokens of prompts in one step; 16384",
    "page_size": "tokens of a page; 1",
    "cuda_graph_bs": "batch sizes to record",
    "cuda_graph_max_bs": "largest batch size to record; by card",
    "disable_cuda_graph": "no graphs",
    "disable_radix_cache": "no reuse of prefixes; decides how states are divided",
    "kv_cache_dtype": "auto: the model's dtype",
    "enable_dp_attention": "each rank keeps all heads of its own requests",
    "speculative_algorithm": "draft method",
    "speculative_draft_model_path": "the draft's checkpoint; the model's own modules",
    "speculative_num_steps": "tokens drafted one after another; by family",
    "speculative_eagle_topk": "branches of a tree of drafts; 1",
    "speculative_num_draft_tokens": "drafted tokens verified at once; by family",
    "swa_full_tokens_ratio": "tokens of windowed layers for each token of the full ones; 0.8",
    "mamba_full_memory_ratio": "bytes of states for each byte of cache; 0.9",
    "attention_backend": "kernels of attention; by card and version",
    SIZE_SETTING: "bytes of FlashInfer's workspace; 384 MiB, for some families 512 MiB",
    "enable_hierarchical_cache": "keep evicted pages in host memory",
    "hicache_ratio": "host pages for each page on the card; 2",
    "hicache_size": "GB of host memory for evicted pages, per rank and pool; instead of the ratio",
}
_WINDOW_RATIO = 0.8
_STATE_RATIO = 0.9
_GB24, _GB35, _GB60, _GB90, _GB160 = 20 * 1024, 35 * 1024, 60 * 1024, 90 * 1024, 160 * 1024


@dataclass(frozen=True, slots=True)
class CardClass:
    """Defaults by the card's size: prefill tokens of a step and the largest recorded batch."""

    chunk: int
    graph_batch: int


class SglangPolicy(EnginePolicy):
    """SGLang from 0.2 on."""

    name: ClassVar[str] = "sglang"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest) -> Ledger:
        settings = check_settings("sglang", request.settings, KNOWN_SETTINGS)
        version = read_version("sglang", request.engine_version, request.as_of)
        dims = dims_from_config(request.model.config, request.model.name)
        refuse_layout(request, dims, attention_ranks=_attention_ranks(settings, request))
        return build_ledger(request, _outcome(request, settings, version, dims))


def _outcome(request: PlanRequest, settings: dict[str, Any], version: EngineVersion, dims: Dims) -> Outcome:
    total = request.total_bytes or request.gpu.total_bytes
    layout = request.layout
    smi_mib = (request.gpu.smi_bytes or total) // MIB
    share = fraction(settings, "mem_fraction_static", default_fraction(settings, version, dims, smi_mib, request))
    before = _free_before_load(request, total, free_at_start(request))
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    stage = max(1, len(dims.layers) // layout.pp)
    draft = read_draft(settings, request, dims, _attention_ranks(settings, request))
    charged_draft = is_charged(version)
    shard = Shard(
        tp=layout.tp,
        experts_over=layout.tp,
        whole_experts=layout.ep > 1,
        end_layer=stage,
        has_head=layout.pp == 1,
        attention_tp=_attention_ranks(settings, request) if _has_dp_attention(settings) else 0,
    )
    drafting = replace(shard, draft_layers=draft.modules, draft=head_weights(draft, dims, kind))
    shard = drafting if charged_draft else shard
    weights = rank_weights(request, dims, kind, shard)
    limit = int(before.bytes * share)
    spread = int((before.high_bytes - before.low_bytes) * share / 2)
    charged = [Part("weights", "models", weights, "load"), Part("context", "loader", _leftovers(), "load")]
    rest = limit - weights.bytes - _leftovers().bytes
    pool, state = _pool(settings, request, version, dims, draft, rest)
    charged.append(Part("recurrent_state", "resources", state, "reserve"))
    context = Figure(total - before.bytes, total - before.high_bytes, total - before.low_bytes, "modelled", before.why)
    scratch = attention_scratch(
        settings, version, dims, request.gpu, ranks=_attention_ranks(settings, request),
        recorded=_recorded(settings, card_class(version, smi_mib, layout.tp)),
    )  # fmt: skip
    return Outcome(
        capacity_bytes=total,
        budget=Budget(limit, "mem_fraction_static", share, spread),
        charged=tuple(charged),
        outside=(
            Part("context", "driver", context, "load"),
            *_lives_in_the_rest(settings, version, dims, shard, draft, smi_mib),
            *scratch.parts,
            *(() if charged_draft else _late_draft(request, dims, kind, shard, drafting)),
        ),
        pool=pool,
        engine="sglang",
        version=str(version),
        notes=(
            f"SGLang {version}" + ("" if version.given else " (not given: the newest before the plan's date)"),
            "mem_fraction_static is a share of the memory that is free before loading; activations, graphs and "
            "request tables live in the rest.",
            *system_notes(request),
        ),
        warnings=scratch.warnings,
    )


def _has_dp_attention(settings: dict[str, Any]) -> bool:
    return switch(settings, "enable_dp_attention", default=False)


def _attention_ranks(settings: dict[str, Any], request: PlanRequest) -> int:
    """Ranks that divide the heads: of one data-parallel group where attention runs by request groups."""
    if not _has_dp_attention(settings):
        return request.layout.tp
    return max(1, request.layout.tp // max(request.layout.dp, 1))


def _free_before_load(request: PlanRequest, total: int, known_free: int | None) -> Figure:
    """What was found free or, where that is not known, the total less the context and, with several ranks, the
    communicators.

    Logs print 22.4 to 22.8 GiB free on cards of 24 GB before loading, 78.6 on one of 80 GB, and on linked cards 1.5 to
    3 GiB less than their total.
    """
    context = context_bytes(request.gpu)
    linked = (request.gpu.bandwidth_bytes_per_s or 0) > _LINKED_BANDWIDTH
    held = context.bytes + (GIB // 10 if linked else GIB // 3)
    wide = GIB // 4
    if request.layout.tp * request.layout.pp > 1:
        held += GIB * 9 // 10 if linked else GIB // 10
        wide = GIB if linked else GIB // 2
    free = min(total, known_free) if known_free else total - held
    return Figure(free, free - wide, min(free + wide, total), "modelled", "driver, libraries, communicators")


def _leftovers() -> Figure:
    """What the loader leaves behind counts as weights, because only free memory is compared."""
    return Figure(GIB * 8 // 100, 0, GIB * 16 // 100, "modelled", "left behind by the loader")


def default_fraction(
    settings: dict[str, Any], version: EngineVersion, dims: Dims | None, smi_mib: int, request: PlanRequest
) -> float:
    """The share where the user sets none: a table by ranks until 0.4.6, then what a reserve in MiB leaves.

    ``dims`` None: a model whose encoder, if it has one, is not known.
    """
    tp, pp = request.layout.tp, request.layout.pp
    if not version.at_least(0, 4, 7):
        share = _table_fraction(version, tp, smi_mib)
    else:
        reserve = _reserve_mib(settings, version, tp, pp, smi_mib, request.layout.dp)
        share = round((smi_mib - reserve) / smi_mib, 3)
    if dims is not None and dims.multimodal and dims.vision_hidden and dims.vision_layers:
        size = dims.vision_layers * dims.vision_hidden**2 / (24 * 1024**2)
        share *= 0.95 * min(max(1 - 0.1 * (size - 1), 0.8), 1.05)
    return min(max(share, 0.05), 0.99)


def _table_fraction(version: EngineVersion, tp: int, smi_mib: int) -> float:
    steps = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87))
    share = next((share for ranks, share in steps if tp >= ranks), 0.88)
    if version.at_least(0, 4, 6) and smi_mib > 96 * 1024:
        share = min(share + 48 * 1024 * (1 - share) / smi_mib, (smi_mib - 18 * 1024) / smi_mib)
    return share


def _reserve_mib(settings: dict[str, Any], version: EngineVersion, tp: int, pp: int, smi_mib: int, dp: int) -> float:
    algorithm = str(settings.get("speculative_algorithm") or "").upper()
    dp_attention = _has_dp_attention(settings)
    if not version.at_least(0, 5, 3):
        per_class = ((_GB35, 2.8 + tp * pp / 10), (_GB90, 9.5 + tp * pp / 2), (_GB160, 12 + tp * pp / 2))
        reserve = next((gib * 1024 for bound, gib in per_class if smi_mib < bound), 32 * 1024)
        return reserve + reserve_mib(algorithm, version) + (4096 if dp_attention else 0)
    card = card_class(version, smi_mib, tp)
    chunk = whole(settings, "chunked_prefill_size", card.chunk) or card.chunk
    if dp_attention:
        chunk //= max(dp, 1)
    batch = _graph_batch(settings, card)
    reserve = 512 + 1.5 * max(chunk, 2048) + 2 * batch + tp * pp * 128
    if dp_attention:
        reserve += 3 * batch * dp + (1.5 * batch * dp if batch > 300 else 0)
    if smi_mib > _GB60:
        reserve = max(reserve, 10240)
    return reserve + reserve_mib(algorithm, version)


def _recorded(settings: dict[str, Any], card: CardClass) -> int:
    """The largest batch of a graph, 0 without graphs."""
    return 0 if switch(settings, "disable_cuda_graph", default=False) else _graph_batch(settings, card)


def _graph_batch(settings: dict[str, Any], card: CardClass) -> int:
    sizes = settings.get("cuda_graph_bs")
    if isinstance(sizes, (list, tuple)) and sizes:
        return int(max(sizes))
    return whole(settings, "cuda_graph_max_bs", card.graph_batch) or 0


def card_class(version: EngineVersion, smi_mib: int, tp: int) -> CardClass:
    """Defaults by size of card and ranks."""
    many = tp >= 4
    new = version.at_least(0, 5, 3)
    if not version.at_least(0, 4, 7):
        return CardClass(2048 if smi_mib < 25000 else 8192, 8 if smi_mib < 25000 else 160)
    if smi_mib < _GB24:
        return CardClass(2048, 8)
    if smi_mib < _GB35:
        few = 8 if not new else 16 if not version.at_least(0, 5, 6) else 24
        return CardClass(2048, 80 if many else few)
    if smi_mib < _GB60:
        return CardClass(4096 if new else 8192, 160 if many else 32)
    if smi_mib < _GB160:
        return CardClass(8192, 512 if many else 256) if new else CardClass(8192, 160)
    return CardClass(16384, 512)


def _late_draft(
    request: PlanRequest, dims: Dims, kind: WeightFormat, alone: Shard, drafting: Shard
) -> tuple[Part, ...]:
    """A draft that is loaded once the pool is there."""
    if drafting == alone:
        return ()
    both, own = rank_weights(request, dims, kind, drafting), rank_weights(request, dims, kind, alone)
    figure = Figure(
        both.bytes - own.bytes, both.low_bytes - own.low_bytes, both.high_bytes - own.high_bytes, both.basis,
        "a draft loaded after the pool",
    )  # fmt: skip
    return (Part("draft_weights", "drafts", figure, "load"),)


def _lives_in_the_rest(
    settings: dict[str, Any], version: EngineVersion, dims: Dims, shard: Shard, draft: Draft, smi_mib: int
) -> tuple[Part, ...]:
    card = card_class(version, smi_mib, shard.tp)
    chunk = whole(settings, "chunked_prefill_size", card.chunk) or card.chunk
    length = whole(settings, "context_length", dims.max_len or 4096) or 4096
    seats = whole(settings, "max_running_requests", SEATS if draft.tokens else 2048) or 2048
    table = seats * (length + 4) * 4
    forward = chunk * (6 * max(dims.intermediate, dims.expert_intermediate) // shard.tp + 6 * dims.hidden)
    batch = _recorded(settings, card)
    graphs = int((0.05 + 0.0025 * batch) * GIB)
    return (
        Part(
            "fixed_workspace",
            "scheduler",
            Figure.exact(table, f"{seats} seats x {length} + 4 tokens x 4 B", "modelled"),
            "serve",
        ),
        Part(
            "activations", "models", Figure(forward, forward // 2, forward * 2, "modelled", f"{chunk} tokens"), "serve"
        ),
        Part(
            "graphs", "graphs", Figure(graphs, graphs // 3, graphs * 3, "modelled", f"batches up to {batch}"), "capture"
        ),
    )


def _pool(
    settings: dict[str, Any], request: PlanRequest, version: EngineVersion, dims: Dims, draft: Draft, rest: int
) -> tuple[Pool, Figure]:
    """How the bytes become tokens, and what states of hybrid models take first."""
    layers = _cached(settings, request, version, dims, _attention_ranks(settings, request))
    stage = max(1, len(layers) // request.layout.pp)
    layers = layers[:stage]
    own = _cached(settings, request, version, replace(draft.dims or dims, layers=draft.layers), draft.ranks)
    page = whole(settings, "page_size", 1) or 1
    full = sum(layer.token_bytes for layer in layers if layer.kind == "full")
    ratio = float(settings.get("swa_full_tokens_ratio", _WINDOW_RATIO))
    windows = sum(layer.token_bytes for layer in layers if layer.kind in ("sliding", "chunked"))
    cell = full + int(ratio * windows) if full else windows
    cell += draft_cell_bytes(draft, dims, layers, own, version)
    state = _state_bytes(settings, layers, draft, rest)
    cap = whole(settings, "max_total_tokens")
    longest = whole(settings, "context_length", dims.max_len or 4096) or 4096

    def tokens(nbytes: int) -> int:
        count = align_down(max(nbytes, 0) // max(cell, 1), page)
        return min(count, cap) if cap else count

    pool = Pool(
        tokens=tokens,
        blocks=lambda nbytes: tokens(nbytes) // page,
        tokens_per_block=page,
        bytes_per_token=cell,
        fixed_bytes=state.bytes,
        concurrency=lambda nbytes: tokens(nbytes) / longest,
        needed_bytes=align_up(1, page) * cell,
    )
    return pool, state


def _cached(
    settings: dict[str, Any], request: PlanRequest, version: EngineVersion, dims: Dims, tp: int
) -> list[CachedLayer]:
    """Every layer's cache as the sizing counts it. Where a scorer chooses tokens, cards of compute capability 10 cache
    in 8 bits unasked, and from 0.5.18 on other cards' latents in 8 bits are counted with their scales."""
    given = settings.get("kv_cache_dtype")
    text = str(given) if given is not None else request.kv_dtype
    blackwell = request.gpu.sm is not None and request.gpu.sm >= 100
    if dims.indexer is not None and text in (None, "auto"):
        text = "fp8" if blackwell else "bf16"
    bits = cache_bits(text, dims.element_bytes, dims.quantization)
    asked = dims.state.matrix_bytes if dims.state else None
    packed = PACKED_LATENT if bits == 8 and version.at_least(0, 5, 18) and not blackwell else 0
    return cached_layers(
        dims, bits, tp, (dims.element_bytes, asked or 4), 0, packed_bytes=packed,
        borrowed_keys=not version.at_least(0, 5, 18),
    )  # fmt: skip


def _state_bytes(settings: dict[str, Any], layers: list[CachedLayer], draft: Draft, rest: int) -> Figure:
    """States get their share of what is left; without reuse of prefixes one for each request that may run. Drafts take
    one more for each request and drafted token first."""
    slot = sum(layer.state_bytes for layer in layers)
    if not slot or rest <= 0:
        return Figure.exact(0)
    seats = whole(settings, "max_running_requests", SEATS if draft.tokens else 512) or 512
    drafted = seats * draft.tokens * slot
    rest -= drafted
    if switch(settings, "disable_radix_cache", default=False):
        slots = seats
    else:
        ratio = float(settings.get("mamba_full_memory_ratio", _STATE_RATIO))
        slots = int(rest * ratio / (1 + ratio)) // slot
    slots = max(slots, 0)
    why = f"{slots} + 1 states of {slot} B" + (f" and {seats} x {draft.tokens} of drafts" if drafted else "")
    return Figure.exact((slots + 1) * slot + drafted, why, "modelled")
