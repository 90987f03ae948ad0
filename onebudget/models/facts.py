"""What the budget needs to know about a model, read from its ``config.json``. No torch, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onebudget.budget.cost import CacheCost
from onebudget.errors import ModelError

LayerKind = Literal["full", "sliding", "linear", "latent"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "float8_e4m3fn": 1}
_KV_TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn"}
_LAYER_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "recurrent": "linear",
}


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of multi-head latent attention (MLA): a token is cached as ``rank`` compressed elements and ``rope_dim``
    elements of one key that all heads share; a head's key has ``nope_dim + rope_dim`` elements, its value
    ``value_dim``."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def cached_dim(self) -> int:
        return self.rank + self.rope_dim

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Shape of one model. Sizes in elements; ``layers`` holds one kind per layer, first to last.

    ``latent_dim`` is the width a latent (MLA) layer caches per token, 0 elsewhere; ``latent`` has its parts. With
    several ``ranks`` the heads are those of one rank, everything else is of the whole model; with ``attention_dp`` each
    of them has all heads.
    """

    name: str
    architecture: str
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str
    max_position: int
    sliding_window: int | None = None
    latent_dim: int = 0
    quantization: str | None = None
    latent: LatentShape | None = None
    ranks: int = 1
    attention_dp: bool = False

    def kv_elements_per_token(self) -> int:
        """Cached elements of one token over all layers that cache per token (K and V, or one latent)."""
        per_layer = {"latent": self.latent_dim, "linear": 0}
        pair = 2 * self.num_kv_heads * self.head_dim
        return sum(per_layer.get(kind, pair) for kind in self.layers)

    def cache_cost(self, kv_dtype: str) -> CacheCost:
        """Bytes of KV cache per token: elements times the bytes of ``kv_dtype`` (one rank, no states)."""
        return CacheCost(slope=self.kv_elements_per_token() * KV_DTYPE_BYTES[kv_dtype])


def kv_dtype_name(knob: str, model_dtype: str) -> str:
    """torch's name of the cache's dtype for the ``kv_cache_dtype`` knob; ``auto`` is the model's own."""
    return _KV_TORCH_NAMES.get(knob, model_dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder as a dict. ``ModelError`` when it is missing or no JSON object."""
    path = folder / "config.json"
    if not folder.is_dir():
        missing = "it is a file" if folder.exists() else "it does not exist"
        raise ModelError(
            f"{folder} is no model folder: {missing}. Give a folder with config.json, tokenizer files and "
            "*.safetensors, or leave the model out for the demo model."
        )
    if not path.is_file():
        found = sorted(entry.name for entry in folder.iterdir())[:6]
        raise ModelError(f"{folder} has no config.json (it holds {', '.join(found) or 'nothing'}): not a model folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}. Fetch the file again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f'{path} has no "model_type", so the architecture is unknown.')
    return config


def facts_from_config(config: Mapping[str, Any], *, name: str = "") -> ModelFacts:
    """Facts from a ``config.json`` mapping (or ``PretrainedConfig.to_dict()``).

    Multimodal configs keep the language model under ``text_config``; it is used when present.
    Raises ``ModelError`` naming the key that is missing, the value that is none, or the kind of layer nobody knows.
    """
    try:
        return _facts(config, name)
    except KeyError as missing:
        raise ModelError(f"the config of {name or 'this model'} has no {missing}: the KV cost is unknown.") from None
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"the config of {name or 'this model'} has a value of the wrong kind: {error}.") from error


def _facts(config: Mapping[str, Any], name: str) -> ModelFacts:
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else dict(config)
    num_heads, hidden_size = int(text["num_attention_heads"]), int(text["hidden_size"])
    latent = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]) if text.get("kv_lora_rank") else 0
    quantization = config.get("quantization_config") or text.get("quantization_config")
    return ModelFacts(
        name=name,
        architecture=(config.get("architectures") or [str(config.get("model_type"))])[0],
        layers=_layer_kinds(text, int(text["num_hidden_layers"]), latent),
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=int(text.get("head_dim") or hidden_size // num_heads),
        hidden_size=hidden_size,
        vocab_size=int(text["vocab_size"]),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch."),
        max_position=int(text.get("max_position_embeddings") or 2048),
        sliding_window=_window(text),
        latent_dim=latent,
        quantization=None if not quantization else str(quantization.get("quant_method", "unknown")),
        latent=_latent_shape(text) if latent else None,
    )


def _latent_shape(text: Mapping[str, Any]) -> LatentShape | None:
    """None when the config leaves the widths of the heads open: the cache's cost is known even then."""
    try:
        return LatentShape(
            rank=int(text["kv_lora_rank"]),
            rope_dim=int(text["qk_rope_head_dim"]),
            nope_dim=int(text["qk_nope_head_dim"]),
            value_dim=int(text["v_head_dim"]),
        )
    except (KeyError, TypeError):
        return None


def _layer_kinds(text: Mapping[str, Any], num_layers: int, latent: int) -> tuple[LayerKind, ...]:
    declared = text.get("layer_types")
    if declared:
        kinds = tuple(_layer_kind(kind) for kind in declared)
        return tuple("latent" if latent and kind == "full" else kind for kind in kinds)
    if latent:
        kind: LayerKind = "latent"
    else:
        kind = "sliding" if _window(text) else "full"
    return tuple([kind] * num_layers)


def _layer_kind(declared: object) -> LayerKind:
    kind = _LAYER_KINDS.get(str(declared))
    if kind is None:
        raise ModelError(f"a layer of kind {declared!r} is unknown: what it caches can't be priced.")
    return kind


def _window(text: Mapping[str, Any]) -> int | None:
    window = text.get("sliding_window")
    return int(window) if window and text.get("use_sliding_window", True) else None
