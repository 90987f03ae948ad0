"""Speculative decoding: what a draft weighs and caches beside the model it drafts for.

A draft is layers of the model's own checkpoint (MTP), a head with a checkpoint of its own that reads the model's
hidden states (EAGLE, EAGLE3, DFlash), or a model by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onebudget.errors import ConfigError, ModelError
from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.dims import Dims, LayerDims, dims_from_config
from onebudget.planner.policies.formats import FORMATS, WeightFormat, weight_format
from onebudget.planner.policies.weight_headers import is_sum_of_headers, tensor_share, weights_in_headers
from onebudget.planner.policies.weight_rules import VOCAB_PADDING, Shard, layer_bits, rope_bytes, weights_on_rank
from onebudget.planner.source import ModelSource, resolve_model
from onebudget.units import align_up, ceil_div

if TYPE_CHECKING:
    from onebudget.planner.policies.base import PlanRequest

DraftKind = Literal["none", "mtp", "eagle", "eagle3", "block", "model"]

_ONE_MODULE = ("longcat_flash", "mimo_v2")
"""Families of which engines load the first module alone, whatever the checkpoint holds."""
_SLIDING_MODULES = ("mimo_v2", "dots3")
_READ_ROWS = 3
"""Hidden states that an EAGLE3 head reads where its config names no layers."""
_TABLES = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$")
_LEFT = re.compile(r"(?:^|\.)(?:t2d|d2t|mask_hidden|rotary_emb\.inv_freq)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """``tokens`` drafted per step. ``layers`` cache beside the model's; their widths are those of ``dims``, and where
    it is None those of the model. ``source``: the draft's own facts. ``ranks`` divide it. ``modules`` of the model's
    own checkpoint are loaded. ``read_rows``: hidden states of the model that the draft reads beside the last."""

    kind: DraftKind = "none"
    method: str = ""
    tokens: int = 0
    layers: tuple[LayerDims, ...] = ()
    dims: Dims | None = None
    source: ModelSource | None = None
    ranks: int = 1
    modules: int = 0
    read_rows: int = 0


def read_mapping(name: str, given: object, key: str) -> dict[str, Any]:
    """A setting that is a mapping, the same as JSON, or one word that stands under ``key``; empty for nothing."""
    if not given:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    text = str(given).strip()
    if not text.startswith("{"):
        return {key: text}
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ConfigError.for_field(name, given, f"a {key}, or a JSON object with one") from error


def module_draft(target: Dims, *, method: str, tokens: int, ranks: int, modules: int | None = None) -> Draft:
    """Layers of the model's own checkpoint: every module it holds, however many tokens are drafted; one where the
    config does not say."""
    count = modules or (1 if target.family.startswith(_ONE_MODULE) else max(target.draft_layers, 1))
    return Draft(
        kind="mtp", method=method, tokens=tokens, layers=(module_layer(target),) * count, ranks=ranks, modules=count
    )


def module_layer(target: Dims) -> LayerDims:
    """How a module caches: as a full layer does, with a scorer of its own, or with a window in some families."""
    kind = "sliding" if target.family.startswith(_SLIDING_MODULES) else "full"
    layer = next((layer for layer in target.layers if layer.kind == kind), target.layers[-1])
    return replace(layer, borrows_index=False)


def head_draft(
    target: Dims, source: ModelSource | None, *, kind: DraftKind, method: str, tokens: int, ranks: int
) -> Draft:
    """A head that reads hidden states; without its facts one layer like the model's."""
    if source is None:
        rows = _READ_ROWS if kind == "eagle3" else 0
        layers = (module_layer(target),)
        return Draft(kind=kind, method=method, tokens=tokens, layers=layers, ranks=ranks, read_rows=rows)
    dims = dims_from_config(source.config, source.name)
    return Draft(
        kind=kind, method=method, tokens=tokens, layers=_head_layers(source, dims), dims=dims, source=source,
        ranks=ranks, read_rows=_read_rows(source, dims, kind),
    )  # fmt: skip


def model_draft(source: ModelSource, *, method: str, tokens: int, ranks: int) -> Draft:
    """A model by itself, with layers of its own."""
    dims = dims_from_config(source.config, source.name)
    return Draft(kind="model", method=method, tokens=tokens, layers=dims.layers, dims=dims, source=source, ranks=ranks)


def find_draft(name: str, request: PlanRequest, *, needed: bool) -> ModelSource | None:
    """Facts of the draft a setting names. ``needed`` False: None where nobody knows it, so that a layer like the
    model's stands in."""
    try:
        return resolve_model(name, offline=request.offline) if Path(name).exists() else _known(name, request.offline)
    except ModelError:
        if needed:
            raise
        return None


@lru_cache(maxsize=64)
def _known(name: str, offline: bool) -> ModelSource:
    return resolve_model(name, offline=offline)


def _head_layers(source: ModelSource, dims: Dims) -> tuple[LayerDims, ...]:
    """Layers of a head, with the window that some heads over blocks name apart."""
    block = source.config.get("dflash_config") or {}
    window = block.get("swa_window_size") or source.config.get("sliding_window")
    if block.get("use_swa") and window and not dims.has_windows:
        return tuple(replace(layer, kind="sliding", window=int(window)) for layer in dims.layers)
    return dims.layers


def _read_rows(source: ModelSource, dims: Dims, kind: DraftKind) -> int:
    if kind == "eagle":
        return 0
    config = source.config
    named = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    named = named or (config.get("dflash_config") or {}).get("target_layer_ids")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        return 0
    given = config.get("num_aux_hidden_states") or len(named or ())
    return int(given or (_READ_ROWS if kind == "eagle3" else len(dims.layers)))


def draft_weights(
    draft: Draft, target: Dims, kind: WeightFormat, *, own_tables: bool, equal_heads_shared: bool = False
) -> Figure | None:
    """Bytes of a draft with facts or a checkpoint of its own on one rank, None where it has none.

    Heads share the model's tables unless ``own_tables``, or their widths or vocabulary differ; an EAGLE3 head keeps its
    own output table, but one as large as the model's is taken for the same where ``equal_heads_shared``.
    """
    if draft.kind in ("none", "mtp"):
        return None
    if draft.dims is None or draft.source is None:
        return _guessed_head(draft, target, kind)
    own = weight_format(None, draft.dims.quantization, draft.dims.name)
    if draft.kind == "model":
        return _whole_model(draft.source, draft.dims, own, draft.ranks)
    tables = _own_tables(draft, draft.dims, target, own_tables=own_tables, equal_heads_shared=equal_heads_shared)
    rope = 0 if _same_rope(draft.dims, target) else rope_bytes(draft.dims)
    if is_sum_of_headers(draft.source.tensors, own):
        return Figure.exact(_stored(draft, draft.dims) + tables + rope, f"stored tensors of {draft.source.name}")
    nbytes = int(_head_bits(draft, draft.dims, target, own) / 8) + tables + rope
    unsure = nbytes // 50
    return Figure(nbytes, nbytes - unsure, nbytes + unsure, "modelled", f"the draft head {draft.source.name}")


def _whole_model(source: ModelSource, dims: Dims, kind: WeightFormat, ranks: int) -> Figure:
    shard = Shard(tp=ranks, experts_over=ranks, vision=False)
    if source.tensors and is_sum_of_headers(source.tensors, kind):
        return weights_in_headers(source.tensors, dims, shard)
    return weights_on_rank(dims, kind, shard)


def _guessed_head(draft: Draft, target: Dims, kind: WeightFormat) -> Figure:
    """A layer like the model's in 16 bits, and what joins embeddings and hidden states: half to twice that, because
    nothing is known of it."""
    dims = replace(target, layers=draft.layers, experts=0, intermediate=target.intermediate or 4 * target.hidden)
    nbytes = int(_head_bits(draft, dims, target, kind if kind.bits >= 16 else FORMATS["bf16"]) / 8)
    return Figure(nbytes, nbytes // 2, 2 * nbytes, "assumed", "a draft head like a layer of the model")


def _head_bits(draft: Draft, dims: Dims, target: Dims, kind: WeightFormat) -> Fraction:
    shard = Shard(tp=draft.ranks, experts_over=draft.ranks)
    bits = sum((layer_bits(dims, layer, i, kind, shard) for i, layer in enumerate(draft.layers)), Fraction(0))
    if draft.kind == "eagle3":  # the first layer reads embeddings beside hidden states
        first = draft.layers[0]
        rows = dims.heads * (first.k_dim or dims.head_dim) // draft.ranks
        rows += max(1, first.kv_heads // draft.ranks) * (first.k_dim + first.v_dim)
        bits += kind.attention_bits * rows * dims.hidden
    joined = 2 * dims.hidden if draft.kind == "eagle" else draft.read_rows * target.hidden
    return bits + kind.attention_bits * joined * dims.hidden + 16 * 2 * dims.hidden


def _own_tables(draft: Draft, dims: Dims, target: Dims, *, own_tables: bool, equal_heads_shared: bool) -> int:
    """Bytes of the tables that are not the model's, in 16 bits, divided by rows."""
    assert draft.source is not None
    rows = align_up(dims.vocab, VOCAB_PADDING)
    own_rows = int(draft.source.config.get("draft_vocab_size") or dims.vocab)
    embedding = rows if own_tables or (dims.hidden, dims.vocab) != (target.hidden, target.vocab) else 0
    differs = own_rows != target.vocab or dims.hidden != target.hidden
    head = align_up(own_rows, VOCAB_PADDING) if _keeps_head(draft, differs, equal_heads_shared) else 0
    ids = 8 * own_rows if draft.kind == "eagle3" and own_rows != dims.vocab else 0
    return ceil_div((embedding + head) * dims.hidden * 2, draft.ranks) + ids


def _keeps_head(draft: Draft, differs: bool, equal_heads_shared: bool) -> bool:
    if draft.kind != "eagle3":
        return False
    stored = draft.source.tensors if draft.source else None
    if stored:
        has = any(tensor.name.endswith("lm_head.weight") for tensor in stored)
        return has and (differs or not equal_heads_shared)
    return differs or not equal_heads_shared


def _stored(draft: Draft, dims: Dims) -> int:
    """Stored bytes of a head's share, without tables and without what engines leave out."""
    assert draft.source is not None and draft.source.tensors is not None
    shard = Shard(tp=draft.ranks, experts_over=draft.ranks)
    total = Fraction(0)
    for tensor in draft.source.tensors:
        if not _TABLES.search(tensor.name) and not _LEFT.search(tensor.name):
            total += tensor.nbytes * tensor_share(tensor, dims, shard)
    return ceil_div(total.numerator, total.denominator)


def _same_rope(dims: Dims, target: Dims) -> bool:
    return (dims.max_len, dims.rope or dims.head_dim) == (target.max_len, target.rope or target.head_dim)
