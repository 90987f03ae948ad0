"""Bytes of weights on one rank from the headers of a checkpoint: what is stored, divided as engines divide it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.weight_rules import VOCAB_PADDING, Shard, rope_bytes, weights_on_rank
from onebudget.units import GIB, align_up

if TYPE_CHECKING:
    from onebudget.models.files import TensorEntry
    from onebudget.planner.policies.base import PlanRequest
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.policies.formats import WeightFormat

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
_TABLES = re.compile(r"(?:embed_tokens|wte|word_embeddings|token_embd|lm_head|^output)\.weight")
_HEAD = re.compile(r"(?:lm_head|^output)\.weight")
_EXPERT = re.compile(r"\.(?:experts|block_sparse_moe\.experts)\.|_exps\.")
_ENCODER = re.compile(r"(?:vision|visual|audio|image|multi_modal_projector|mm_projector)")
_MODULE = re.compile(r"(?:^|\.)mtp(?:_layers|_block)?\.(?:layers\.)?(?:(\d+)\.)?")
_MODULE_TABLE = re.compile(r"embed_tokens|lm_head|shared_head\.head|tok_emb")
_DIVIDED = re.compile(r"(?:^|\.)(?:mtp\.fc|mtp_layers\.\d+|midlayer)\.")
_KV = re.compile(r"\.(?:k_proj|v_proj|attn_k|attn_v)\.")
_WHOLE = re.compile(
    r"norm|(?:o_proj|down_proj|out_proj)\.bias|\.gate\.(?:weight|e_score)|router|q_a_proj|kv_a_proj|rotary|g_idx|"
    r"e_score_correction|indexer|sinks|eh_proj|mtp_layers\.\d+\.input_proj"
)


_LEFT_BY_LOADERS = GIB // 10
"""Logs of quantised checkpoints show 0.02 to 0.09 GiB above what is stored: repacked scales, workspaces of kernels."""


def rank_weights(request: PlanRequest, dims: Dims, kind: WeightFormat, shard: Shard) -> Figure:
    """Weights of one rank, a draft's among them: from the headers where the source has them and no other format is
    asked for, else by rule.

    Experts in MXFP4 go by rule too: kernels pad them beyond what is stored.
    """
    tensors = request.model.tensors
    if request.weights_dtype is None and is_sum_of_headers(tensors, kind):
        assert tensors is not None
        found = weights_in_headers(tensors, dims, shard)
        own = Figure(found.bytes, found.bytes, found.bytes + _LEFT_BY_LOADERS, "exact", found.why)
    else:
        own = weights_on_rank(dims, kind, shard)
    return own if shard.draft is None else _both(own, shard.draft)


def is_sum_of_headers(tensors: tuple[TensorEntry, ...] | None, kind: WeightFormat) -> bool:
    """Whether headers are known and say what a rank will hold."""
    return bool(tensors) and kind.name != "mxfp4"


def _both(own: Figure, draft: Figure) -> Figure:
    return Figure(
        own.bytes + draft.bytes, own.low_bytes + draft.low_bytes, own.high_bytes + draft.high_bytes,
        own.basis if draft.basis == "exact" else draft.basis, f"{own.why}; {draft.why}",
    )  # fmt: skip


def weights_in_headers(tensors: Iterable[TensorEntry], dims: Dims, shard: Shard) -> Figure:
    """Stored bytes of this rank's share, tables padded, and the rotary table beside them.

    Embeddings and head are divided by rows, KV heads as far as there are heads for every rank, experts among the ranks
    that divide them, norms, routers and latent down-projections are on every rank, and an encoder is whole where it
    is. Modules for drafts, behind the model's own layers, count where the rank has draft layers; copies of the tables
    that checkpoints store with them count only where the rank keeps them.
    """
    total = Fraction(shard.draft_tables * align_up(dims.vocab, VOCAB_PADDING) * dims.hidden * 2, shard.tp)
    for tensor in tensors:
        if _is_here(tensor.name, dims, shard):
            total += tensor.nbytes * tensor_share(tensor, dims, shard)
    nbytes = -int(-total // 1) + rope_bytes(dims)
    return Figure.exact(nbytes, f"stored tensors divided among {shard.tp} ranks, and the rotary table")


def tensor_share(tensor: TensorEntry, dims: Dims, shard: Shard) -> Fraction:
    """The part of a tensor that one of the ranks that divide it holds."""
    name = tensor.name
    if _ENCODER.search(name):
        return Fraction(1)
    if _TABLES.search(name):
        rows = tensor.shape[0] or 1
        return Fraction(align_up(rows, VOCAB_PADDING), rows * shard.tp)
    if _WHOLE.search(name):
        return Fraction(1)
    if _EXPERT.search(name):
        return Fraction(1, shard.experts_over)
    if _KV.search(name):
        return Fraction(1, min(shard.tp, max(1, dims.kv_heads)))
    return Fraction(1, shard.tp) if _LAYER.search(name) or _DIVIDED.search(name) else Fraction(1)


def _is_here(name: str, dims: Dims, shard: Shard) -> bool:
    """Whether the pipeline stage of this rank holds the tensor."""
    if _ENCODER.search(name):
        return shard.vision
    layer, module = _LAYER.search(name), _MODULE.search(name)
    index, count = int(layer[1]) if layer else 0, len(dims.layers)
    if module is not None or index >= count:
        number = int(module[1] or 0) if module is not None else index - count
        return number < shard.draft_layers and not _MODULE_TABLE.search(name)
    if layer is None:
        if _HEAD.search(name):
            return shard.has_head
        return shard.has_embedding if _TABLES.search(name) else shard.has_head
    return shard.first_layer <= index < (count if shard.end_layer is None else shard.end_layer)
