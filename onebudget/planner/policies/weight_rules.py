"""Bytes of weights on one rank from the widths in a config: what is sharded, replicated, padded, left in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.compressed import CompressedShape
from onebudget.planner.policies.dims import Dims, LayerDims
from onebudget.planner.policies.formats import WeightFormat
from onebudget.units import align_up, ceil_div, format_bytes

VOCAB_PADDING = 64
_UNKNOWN_FACT = 0.01
"""What each fact that a partial config leaves out adds to the relative uncertainty."""
_TILES = {"marlin": (256, 128), "triton": (1, 256)}
"""Multiples of the hidden size and of an expert's width: in vLLM 0.11.2 and 0.28.0, and in two logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The share of one rank. ``experts_over``: ranks that divide the experts; ``whole_experts``: each holds whole ones
    (expert parallel) rather than a slice of each. ``tiles``: which kernel pads experts in MXFP4, ``"marlin"``,
    ``"triton"``, or empty where the engine's choice is not known.
    ``attention_tp``: ranks that divide attention where fewer than ``tp`` do; each has the whole embedding then.
    ``draft_layers``: modules for drafts from the model's own checkpoint; ``draft_tables``: embeddings and heads they
    keep for themselves; ``draft``: bytes of a draft with a checkpoint of its own."""

    tp: int = 1
    experts_over: int = 1
    whole_experts: bool = False
    first_layer: int = 0
    end_layer: int | None = None
    has_embedding: bool = True
    has_head: bool = True
    draft_layers: int = 0
    draft_tables: int = 0
    draft: Figure | None = None
    vision: bool = True
    tiles: str = ""
    attention_tp: int = 0


def weights_on_rank(dims: Dims, kind: WeightFormat, shard: Shard, *, spread: float | None = None) -> Figure:
    """Parameters times their bits. Exact for whole 16-bit text models; a range where a format keeps layers apart."""
    bits = Fraction(0)
    layers = dims.layers[shard.first_layer : shard.end_layer]
    for offset, layer in enumerate(layers):
        bits += layer_bits(dims, layer, shard.first_layer + offset, kind, shard)
    for _ in range(shard.draft_layers):
        bits += layer_bits(dims, _widest(dims), len(dims.layers), kind, shard) + 16 * _joining(dims, shard)
    bits += _table_bits(dims, kind, shard) + shard.draft_tables * _rows(dims, shard) * dims.hidden * 16
    vision = _vision_parameters(dims) * 16 if shard.vision else 0
    nbytes = int((bits + vision) / 8) + rope_bytes(dims)
    wide = (kind.spread if spread is None else spread) + _UNKNOWN_FACT * len(dims.guessed)
    unsure = int(nbytes * wide) + vision // 8 // 10
    why = f"{len(layers)} layers and tables in {kind.name}, {format_bytes(vision // 8)} of them for other inputs"
    return Figure(nbytes, nbytes - unsure, nbytes + unsure, "modelled", why)


def _joining(dims: Dims, shard: Shard) -> int:
    """What joins embeddings and hidden states before a module of drafts; only one family divides it."""
    return 2 * dims.hidden**2 // (shard.tp if dims.family.startswith(("qwen3_next", "qwen3_5")) else 1)


def _widest(dims: Dims) -> LayerDims:
    return next((layer for layer in dims.layers if layer.kind == "full"), dims.layers[-1])


def layer_bits(dims: Dims, layer: LayerDims, index: int, kind: WeightFormat, shard: Shard) -> Fraction:
    """Bits of layer ``index`` on one rank."""
    linear, plain = _attention_parameters(dims, layer, shard.attention_tp or shard.tp)
    plain += 2 * dims.hidden
    moe = bool(dims.experts) and index >= dims.dense_layers
    other = Fraction(16) if kind.experts_only else kind.bits
    if not moe:
        width = dims.intermediate * (2 if layer.kind == "shared" and dims.per_layer_input else 1)
        return kind.attention_bits * linear + other * _mlp(dims, width) // shard.tp + 16 * plain
    plain += dims.hidden * dims.experts
    shared = _mlp(dims, dims.shared_intermediate) // shard.tp
    attention = Fraction(16) if kind.name == "nvfp4" else kind.attention_bits  # checkpoints keep it whole
    if kind.name == "fp4_fp8":  # only routed experts are in 4 bits
        other = kind.attention_bits
    return attention * linear + other * shared + kind.bits * _expert_parameters(dims, kind, shard) + 16 * plain


def _expert_parameters(dims: Dims, kind: WeightFormat, shard: Shard) -> int:
    if shard.whole_experts:
        return ceil_div(dims.experts, shard.experts_over) * _mlp(dims, dims.expert_intermediate)
    width = ceil_div(dims.expert_intermediate, shard.experts_over)
    if kind.name != "mxfp4":
        return dims.experts * _mlp(dims, width)
    padded = [
        align_up(dims.hidden, rows) * align_up(width, columns)
        for tiles, (rows, columns) in _TILES.items() if shard.tiles in ("", tiles)
    ]  # fmt: skip
    return dims.experts * (3 if dims.gated else 2) * sum(padded) // len(padded)


def _mlp(dims: Dims, width: int) -> int:
    return (3 if dims.gated else 2) * dims.hidden * width


def _attention_parameters(dims: Dims, layer: LayerDims, tp: int) -> tuple[int, int]:
    """Parameters in linear layers, and those that stay in 16 bits, on one rank."""
    if layer.kind == "state" and dims.state is not None:
        state = dims.state
        inner = 2 * dims.hidden * state.inner + dims.hidden * state.conv_width
        small = dims.hidden * 2 * state.heads + state.conv_width * (state.conv_rows + 1)
        return inner // tp, small // tp
    if dims.compressed is not None:
        return _compressed_parameters(dims, dims.compressed, layer, tp)
    if layer.latent:
        query = dims.heads * (dims.nope + dims.rope)
        down = dims.hidden * (dims.kv_lora + dims.rope) + (dims.hidden * dims.q_lora)
        up = (dims.q_lora or dims.hidden) * query + dims.kv_lora * dims.heads * (dims.nope + dims.v_head)
        linear, plain = down + (up + dims.heads * dims.v_head * dims.hidden) // tp, dims.q_lora + dims.kv_lora
        if dims.indexer is not None and not layer.borrows_index:
            linear += dims.indexer.linear_parameters(dims.q_lora)
            plain += dims.indexer.plain_parameters(dims.hidden)
        return linear, plain
    k_dim = layer.k_dim or dims.head_dim
    v_dim = layer.v_dim or dims.head_dim
    heads = dims.heads * (2 if dims.output_gate else 1)
    queries = dims.hidden * (heads * k_dim + dims.heads * v_dim) // tp
    kv_heads = max(1, (layer.kv_heads or dims.kv_heads) // tp)
    return queries + dims.hidden * kv_heads * (k_dim + v_dim), 0


def _compressed_parameters(dims: Dims, shape: CompressedShape, layer: LayerDims, tp: int) -> tuple[int, int]:
    """Down-projections, compressors and the scorer are on every rank; up-projections are divided. The second figure is
    of parts in 16 bits, with those in 32 (the mixing of residual streams) counted twice."""
    rows = dims.heads * dims.head_dim
    linear = dims.hidden * (shape.query_rank + dims.head_dim)
    outputs = rows * shape.output_rank + shape.output_groups * shape.output_rank * dims.hidden
    linear += (shape.query_rank * rows + outputs) // tp
    mixing = 2 * shape.streams * dims.hidden * shape.streams * (2 + shape.streams) * 2
    if layer.window:
        return linear, mixing
    overlap = 2 if layer.ratio == 4 else 1
    plain = dims.hidden * 2 * overlap * dims.head_dim
    if layer.ratio == 4:
        linear += shape.query_rank * shape.index_heads * shape.index_dim
        plain += dims.hidden * (shape.index_heads + 2 * overlap * shape.index_dim)
    return linear, plain + mixing


def _rows(dims: Dims, shard: Shard) -> int:
    return align_up(dims.vocab, VOCAB_PADDING) // shard.tp


def _table_bits(dims: Dims, kind: WeightFormat, shard: Shard) -> int:
    rows = _rows(dims, shard)
    if shard.attention_tp:
        whole = dims.vocab * dims.hidden if shard.has_embedding else 0
        return (whole + (rows * dims.hidden if shard.has_head and not dims.tied else 0)) * kind.table_bits
    both = shard.has_embedding and shard.has_head
    copies = 1 if dims.tied and both else int(shard.has_embedding) + int(shard.has_head)
    small = len(dims.layers) * dims.per_layer_input * (dims.vocab // shard.tp + 3 * dims.hidden)
    return (copies * rows * dims.hidden + small) * kind.table_bits


def rope_bytes(dims: Dims) -> int:
    """Tables of cosines and sines over all positions."""
    width = dims.rope or dims.head_dim
    if dims.compressed is not None:  # two tables, one for compressed layers, in 32 bits
        return dims.max_len * width * 4 * 2
    if dims.family == "opt":
        return 0
    if dims.family.startswith(_TWO_BASES):
        caching = (layer for layer in dims.layers if layer.kind != "shared")
        width = sum({layer.kind: layer.k_dim or dims.head_dim for layer in caching}.values())
    return min(dims.max_len, 2**20) * width * 2


_TWO_BASES = ("gemma3", "gemma4")
"""Families whose windows rotate by a base of their own, as wide as their heads."""


# Parameters of encoders whose configs are often partial, from memory of the published models and not checked: a tenth
# of them counts as unsure.
_ENCODERS = {
    "qwen2_5_omni": 1_310_000_000, "qwen3_omni_moe": 1_190_000_000, "qwen2_5_vl": 677_000_000, "qwen2_vl": 675_000_000,
    "qwen3_5": 456_000_000, "qwen3_vl_moe": 540_000_000, "phi3_v": 340_000_000, "gemma4": 550_000_000,
}  # fmt: skip


def _vision_parameters(dims: Dims) -> int:
    if not dims.multimodal:
        return 0
    if dims.vision_hidden and dims.vision_layers:
        width = dims.vision_intermediate or 4 * dims.vision_hidden
        block = 4 * dims.vision_hidden**2 + 2 * dims.vision_hidden * width
        return dims.vision_layers * block + dims.vision_hidden * dims.hidden + dims.hidden**2
    return next((count for family, count in _ENCODERS.items() if dims.family.startswith(family)), 0)
