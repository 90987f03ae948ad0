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
_KV = re.compile(r"\.(?:k_proj|v_proj|attn_k|attn_v)\.")
_WHOLE = re.compile(
    r"norm|(?:o_proj|down_proj|out_proj)\.bias|\.gate\.(?:weight|e_score)|router|q_a_proj|kv_a_proj|rotary|g_idx|"
    r"e_score_correction|indexer|sinks|eh_proj"
)


_LEFT_BY_LOADERS = GIB // 10
"""Logs of quantised checkpoints show 0.02 to 0.09 GiB above what is stored: repacked scales, workspaces of kernels."""


def rank_weights(request: PlanRequest, dims: Dims, kind: WeightFormat, shard: Shard) -> Figure:
    """Weights of one rank: from the headers where the source has them and no other format is asked for, else by rule.

    Experts in MXFP4 go by rule too: kernels pad them beyond what is stored.
    """
    tensors = request.model.tensors
    if not tensors or request.weights_dtype is not None or kind.name == "mxfp4":
        return weights_on_rank(dims, kind, shard)
    found = weights_in_headers(tensors, dims, shard)
    return Figure(found.bytes, found.bytes, found.bytes + _LEFT_BY_LOADERS, "exact", found.why)


def weights_in_headers(tensors: Iterable[TensorEntry], dims: Dims, shard: Shard) -> Figure:
    """Stored bytes of this rank's share, tables padded, and the rotary table beside them.

    Embeddings and head are divided by rows, KV heads as far as there are heads for every rank, experts among the ranks
    that divide them, norms, routers and latent down-projections are on every rank, and an encoder is whole where it
    is. Layers of a draft head, behind the model's own, count where the rank has draft layers.
    """
    total = Fraction(0)
    for tensor in tensors:
        total += tensor.nbytes * _share(tensor, dims, shard)
    nbytes = -int(-total // 1) + rope_bytes(dims)
    return Figure.exact(nbytes, f"stored tensors divided among {shard.tp} ranks, and the rotary table")


def _share(tensor: TensorEntry, dims: Dims, shard: Shard) -> Fraction:
    name = tensor.name
    if _ENCODER.search(name):
        return Fraction(int(shard.vision))
    if not _is_here(name, dims, shard):
        return Fraction(0)
    if _TABLES.search(name):
        rows = tensor.shape[0] or 1
        return Fraction(align_up(rows, VOCAB_PADDING), rows * shard.tp)
    if _WHOLE.search(name):
        return Fraction(1)
    if _EXPERT.search(name):
        return Fraction(1, shard.experts_over)
    if _KV.search(name):
        return Fraction(1, min(shard.tp, max(1, dims.kv_heads)))
    return Fraction(1, shard.tp) if _LAYER.search(name) else Fraction(1)


def _is_here(name: str, dims: Dims, shard: Shard) -> bool:
    """Whether the pipeline stage of this rank holds the tensor."""
    layer = _LAYER.search(name)
    if layer is None:
        if _HEAD.search(name):
            return shard.has_head
        return shard.has_embedding if _TABLES.search(name) else shard.has_head
    index, count = int(layer[1]), len(dims.layers)
    if index >= count:
        return shard.draft_layers > 0
    return shard.first_layer <= index < (count if shard.end_layer is None else shard.end_layer)
