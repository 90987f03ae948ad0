"""What sizing rules need of a model, from its ``config.json``: how each layer caches, and how wide its matrices are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onebudget.errors import ModelError
from onebudget.planner.policies.compressed import CompressedShape, compressed_shape, is_compressed
from onebudget.planner.policies.encoders import EncoderShape, encoder_shape
from onebudget.planner.policies.indexer import IndexerShape, indexer_shape
from onebudget.planner.policies.states import StateShape, state_shape

LayerKind = Literal["full", "sliding", "chunked", "state", "shared"]

_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full", "indexed_attention": "full",
    "sliding_attention": "sliding", "sliding": "sliding", "local": "sliding", "chunked_attention": "chunked",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "recurrent": "state", "linear": "state",
    "moe": "shared", "mlp": "shared",
}  # fmt: skip
_HALF = 2


@dataclass(frozen=True, slots=True)
class LayerDims:
    """How one layer caches a token: heads and widths, or one latent (``kv_heads`` 0), or a state; ``window`` tokens.
    ``ratio`` tokens share one entry of a compressed cache. ``index_bytes``: per token, of a scorer's keys beside the
    latent; ``borrows_index``: the layer before chooses for this one."""

    kind: LayerKind
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    latent: int = 0
    window: int | None = None
    ratio: int = 1
    index_bytes: int = 0
    borrows_index: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Widths of one model in elements; 0 where the config does not say. ``experts`` 0: a dense model. ``guessed``: what
    a partial config left out and its family, or the usual proportions, filled in."""

    name: str
    family: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: tuple[LayerDims, ...]
    max_len: int
    tied: bool
    element_bytes: int = _HALF
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_head: int = 0
    state: StateShape | None = None
    compressed: CompressedShape | None = None
    indexer: IndexerShape | None = None
    draft_layers: int = 0
    output_gate: bool = False
    per_layer_input: int = 0
    multimodal: bool = False
    vision_hidden: int = 0
    vision_layers: int = 0
    vision_intermediate: int = 0
    image_tokens: int = 0
    encoder: EncoderShape | None = None
    quantization: Mapping[str, Any] | None = None
    guessed: tuple[str, ...] = ()

    @property
    def is_latent(self) -> bool:
        return self.kv_lora > 0

    @property
    def is_hybrid(self) -> bool:
        return any(layer.kind == "state" for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        return any(layer.kind in ("sliding", "chunked") for layer in self.layers)


def dims_from_config(config: Mapping[str, Any], name: str = "") -> Dims:
    """Dims of a ``config.json``. Raises ``ModelError`` where layers or KV heads can't be told."""
    text = _text_part(config)
    first = _Reader(text, config)
    count = first.whole("num_hidden_layers", "n_layer", "num_layers")
    heads = first.whole("num_attention_heads", "n_head")
    kv_heads = first.whole("num_key_value_heads", "num_kv_heads") or heads
    hidden = first.whole("hidden_size", "n_embd", "d_model")
    if not hidden:
        raise ModelError(f"{name or 'the config'} has no hidden_size, so nothing can be sized.")
    if not count or not kv_heads:
        raise ModelError(f"{name or 'the config'} does not say how many layers and KV heads the model has.")
    head_dim = first.whole("head_dim") or (hidden // heads if heads else 0)
    if not head_dim:
        raise ModelError(f"{name or 'the config'} has neither head_dim nor hidden_size with num_attention_heads.")
    kv_lora, rope = first.whole("kv_lora_rank"), first.whole("qk_rope_head_dim")
    vision = config.get("vision_config") or {}
    family = str(text.get("model_type") or config.get("model_type") or "").lower()
    compressed = compressed_shape(first.whole, first.get, count) if is_compressed(family) else None
    indexer = None if compressed else indexer_shape(first.whole, first.get, count)
    rope = compressed.rope if compressed else rope or (64 if indexer else 0)  # as in every such family
    layers = _compressed_layers(compressed, head_dim) if compressed else None
    layers = _indexed_layers(indexer, kv_lora + rope) if indexer else layers
    return Dims(
        name=name or str(config.get("_model_id", "")), family=family, hidden=hidden,
        vocab=first.whole("vocab_size") or _FAMILY_VOCAB.get(family.removesuffix("_text"), 0),
        heads=heads or hidden * 6 // 5 // head_dim, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=_intermediate(first, hidden),
        layers=layers or _layers(first, count, kv_heads, head_dim, kv_lora + rope),
        max_len=first.whole("max_position_embeddings", "n_positions", "max_sequence_length")
        or _FAMILY_LENGTH.get(family.removesuffix("_text"), 0),
        tied=bool(first.get("tie_word_embeddings", _tied_by_default(family))),
        element_bytes=4 if str(first.get("torch_dtype") or first.get("dtype")) == "float32" else _HALF,
        gated=family not in ("opt", "gpt2", "gpt_neox", "falcon", "nemotron_h", "starcoder2"),
        experts=first.whole("num_experts", "n_routed_experts", "num_local_experts"),
        experts_per_token=first.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk")
        or (6 if compressed else 0),  # the default of the family's public configuration class
        expert_intermediate=_expert_intermediate(first),
        shared_intermediate=_shared_intermediate(first),
        dense_layers=first.whole("first_k_dense_replace") or _leading_dense(first),
        q_lora=first.whole("q_lora_rank"), kv_lora=kv_lora,
        nope=first.whole("qk_nope_head_dim"), rope=rope, v_head=first.whole("v_head_dim"),
        state=state_shape(first.whole, first.get), compressed=compressed, indexer=indexer,
        draft_layers=first.whole("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        per_layer_input=first.whole("hidden_size_per_layer_input"),
        output_gate=bool(first.get("attn_output_gate")) or family.startswith(("qwen3_next", "qwen3_5")),
        multimodal=_is_multimodal(config), vision_hidden=int(vision.get("hidden_size") or 0),
        vision_layers=int(vision.get("num_hidden_layers") or vision.get("depth") or 0),
        vision_intermediate=int(vision.get("intermediate_size") or 0), image_tokens=_image_tokens(config, vision),
        encoder=encoder_shape(config, family, hidden) if _is_multimodal(config) else None,
        quantization=first.get("quantization_config"), guessed=_guessed(first, family),
    )  # fmt: skip


def _guessed(reader: _Reader, family: str) -> tuple[str, ...]:
    """Facts that weights need and the config does not name."""
    experts = reader.whole("num_experts", "n_routed_experts", "num_local_experts")
    wanted = {
        "vocab_size": reader.whole("vocab_size"),
        "num_attention_heads": reader.whole("num_attention_heads", "n_head"),
        "intermediate_size": experts or reader.whole("intermediate_size", "ffn_dim", "n_inner"),
        "moe_intermediate_size": not experts or _expert_intermediate(reader),
        "linear_num_value_heads": "qwen3_5" not in family or reader.whole("linear_num_value_heads"),
    }
    return tuple(name for name, value in wanted.items() if not value)


# Vocabulary of model families whose partial configs leave it out, from other configs of the families.
_FAMILY_VOCAB = {"qwen3_5": 248320, "qwen3_5_moe": 248320, "gemma4": 262144, "gemma3": 262208, "qwen3_vl_moe": 151936}

_FAMILY_LENGTH = {"gemma3": 131072, "gemma4": 131072}
"""What transformers takes for these where a config leaves it out."""


class _Reader:
    """Looks a key up in the text part, then in the whole config."""

    def __init__(self, text: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        self._parts = (text, whole)

    def get(self, key: str, default: Any = None) -> Any:
        for part in self._parts:
            if part.get(key) is not None:
                return part[key]
        return default

    def whole(self, *keys: str) -> int:
        for key in keys:
            value = self.get(key)
            if value is not None and not isinstance(value, (list, dict)):
                number = int(value)
                if number < 0 or number > 2**34:
                    raise ModelError(f"{key} = {value!r} in the config is no usable size.")
                return number
        return 0


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return _text_part(thinker)
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return config[key]  # type: ignore[no-any-return]
    return config


def _is_multimodal(config: Mapping[str, Any]) -> bool:
    kinds = " ".join(config.get("architectures") or ()) + str(config.get("model_type") or "")
    marks = ("VL", "Vision", "vision", "Llava", "omni", "Omni", "phi3_v", "qwen3_5", "_vl", "Gemma4For", "Llama4For")
    return bool(config.get("vision_config")) or any(mark in kinds for mark in marks)


def _tied_by_default(family: str) -> bool:
    return family.startswith(("gemma", "cohere"))


def _intermediate(reader: _Reader, hidden: int) -> int:
    given = reader.whole("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size")
    return max(given, reader.whole("intermediate_size_mlp")) if given else _family_intermediate(reader, hidden)


def _family_intermediate(reader: _Reader, hidden: int) -> int:
    """Partial configs leave it out: gated models of this size class use between 3 and 3.5 times the hidden size."""
    family = str(reader.get("model_type") or "")
    if reader.whole("num_experts", "n_routed_experts", "num_local_experts"):
        return 0
    return hidden * 17 // 5 if "qwen3_5" in family else hidden * 4


def _expert_intermediate(reader: _Reader) -> int:
    if not reader.whole("num_experts", "n_routed_experts", "num_local_experts"):
        return 0
    return reader.whole("moe_intermediate_size", "intermediate_size")


def _shared_intermediate(reader: _Reader) -> int:
    given = reader.whole("shared_expert_intermediate_size")
    if given:
        return given
    family = str(reader.get("model_type") or "")
    if reader.whole("interleave_moe_layer_step") or family.startswith("gemma4"):  # a dense MLP beside the experts
        return reader.whole("intermediate_size")
    return reader.whole("n_shared_experts", "num_shared_experts") * _expert_intermediate(reader)


def _image_tokens(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Tokens of the largest image where the config tells."""
    given = config.get("mm_tokens_per_image")
    if given:
        return int(given)
    size, patch = vision.get("image_size"), vision.get("patch_size")
    return (int(size) // int(patch)) ** 2 if isinstance(size, int) and isinstance(patch, int) and patch else 0


def _layers(reader: _Reader, count: int, kv_heads: int, head_dim: int, latent: int) -> tuple[LayerDims, ...]:
    kinds = _kinds(reader, count)
    window = reader.whole("sliding_window") or reader.whole("attention_chunk_size") or _family_window(reader) or None
    shared_from = count - reader.whole("num_kv_shared_layers")
    v_dim = 0 if latent else reader.whole("v_head_dim")
    wide_heads = reader.whole("num_global_key_value_heads") or _wide_heads(reader, kv_heads)
    wide_dim = reader.whole("global_head_dim") or head_dim
    window_heads = reader.whole("swa_num_key_value_heads") or kv_heads
    layers = []
    for index, kind in enumerate(kinds):
        if kind == "shared" or (index >= shared_from and kind != "state"):
            layers.append(LayerDims("shared"))
        elif kind == "state":
            layers.append(LayerDims("state"))
        elif latent:
            layers.append(LayerDims(kind, latent=latent))
        elif kind == "full":
            layers.append(LayerDims(kind, wide_heads, wide_dim, v_dim or wide_dim))
        else:
            layers.append(LayerDims(kind, window_heads, head_dim, v_dim or head_dim, window=window))
    return tuple(layers)


def _compressed_layers(shape: CompressedShape, head_dim: int) -> tuple[LayerDims, ...]:
    """Layers with a compressed cache, at their average elements per token; the others have a window alone."""
    layers = []
    for ratio in shape.ratios:
        if ratio:
            latent = -(-(head_dim + (shape.index_dim if ratio == 4 else 0)) // ratio)
            layers.append(LayerDims("full", latent=latent, ratio=ratio))
        else:
            layers.append(LayerDims("sliding", latent=head_dim, window=shape.window))
    return tuple(layers)


def _indexed_layers(shape: IndexerShape, latent: int) -> tuple[LayerDims, ...]:
    return tuple(
        LayerDims("full", latent=latent, index_bytes=shape.token_bytes, borrows_index=shared) for shared in shape.shared
    )


def _leading_dense(reader: _Reader) -> int:
    """Layers before the first with experts, where each layer's kind is listed."""
    kinds = [str(kind) for kind in reader.get("mlp_layer_types") or ()]
    return kinds.index("sparse") if "sparse" in kinds else 0


def _kinds(reader: _Reader, count: int) -> list[LayerKind]:
    names = reader.get("layer_types") or reader.get("layers_block_type")
    if names:
        return _named_kinds([str(name) for name in names], reader)
    pattern = reader.get("hybrid_override_pattern")
    if pattern:
        marks: Mapping[str, LayerKind] = {"M": "state", "*": "full"}
        return [marks.get(mark, "shared") for mark in str(pattern)]
    linear = reader.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers"):
        full = set(linear["full_attn_layers"])
        return ["full" if index + 1 in full else "state" for index in range(count)]
    interval = reader.whole("full_attention_interval")
    if interval:
        return ["full" if (index + 1) % interval == 0 else "state" for index in range(count)]
    return _window_kinds(reader, count)


def _named_kinds(names: list[str], reader: _Reader) -> list[LayerKind]:
    unknown = sorted({name for name in names if name not in _KINDS})
    if unknown:
        raise ModelError(f"layers of kind {', '.join(unknown)} are not known; known are {', '.join(_KINDS)}.")
    kinds = [_KINDS[name] for name in names]
    return kinds if reader.whole("sliding_window", "attention_chunk_size") else _without_windows(kinds)


def _without_windows(kinds: list[LayerKind]) -> list[LayerKind]:
    return ["full" if kind in ("sliding", "chunked") else kind for kind in kinds]


def _window_kinds(reader: _Reader, count: int) -> list[LayerKind]:
    """Windows of models that don't list their layers: every n-th layer is full, or a number of layers has them, or
    all."""
    swa = reader.whole("swa_layers")
    if swa:
        return ["sliding" if index < swa else "full" for index in range(count)]
    if reader.whole("attention_chunk_size"):
        return ["full" if (index + 1) % 4 == 0 else "chunked" for index in range(count)]
    family = str(reader.get("model_type") or "")
    if (
        not (reader.whole("sliding_window") or _family_window(reader))
        or reader.get("use_sliding_window") is False
        or "qwen2" in family
    ):
        return ["full"] * count
    every = reader.whole("sliding_window_pattern") or _PATTERNS.get(family.removesuffix("_text"), 0)
    if every:
        return ["full" if (index + 1) % every == 0 else "sliding" for index in range(count)]
    return ["sliding"] * count


def _wide_heads(reader: _Reader, kv_heads: int) -> int:
    """Full layers with wider heads have fewer of them: a quarter, as in the published config that says, where a partial
    config leaves it out."""
    return max(1, kv_heads // 4) if reader.whole("global_head_dim") else kv_heads


def _family_window(reader: _Reader) -> int:
    """Families that always have windows; partial configs leave them out."""
    return 1024 if str(reader.get("model_type") or "").startswith("gemma4") else 0


_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6, "cohere2": 4, "gpt_oss": 2}
