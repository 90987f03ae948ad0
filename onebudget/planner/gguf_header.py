"""Config and tensors from the header of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onebudget.errors import ModelError
from onebudget.models.files import TensorEntry

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.sliding_window": "sliding_window",
    "rope.dimension_count": "rope_dimension_count",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_FAMILIES = {"deepseek2": "deepseek_v3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}


def read_gguf(path: Path) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
    """A config in the words of ``config.json`` and every tensor with its type. Data is not read.

    Raises ``ModelError`` for a file that is damaged or of another kind.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("GGUF files are read with the package gguf: pip install gguf.") from error
    try:
        reader = GGUFReader(path)
        values = {name: each.contents() for name, each in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = tuple(
            TensorEntry(
                each.name, each.tensor_type.name, tuple(int(size) for size in reversed(each.shape)), int(each.n_bytes)
            )
            for each in reader.tensors
        )
    except Exception as error:  # the reader trusts its file and fails in many ways on a damaged one
        raise ModelError(f"{path} is no usable GGUF file ({type(error).__name__}: {error}). Fetch it again.") from error
    return _config(values, path), tensors


def _config(values: dict[str, Any], path: Path) -> dict[str, Any]:
    family = values.get("general.architecture")
    if not isinstance(family, str):
        raise ModelError(f"{path} does not say which architecture it is.")
    config: dict[str, Any] = {"model_type": _FAMILIES.get(family, family)}
    for key, name in _KEYS.items():
        value = values.get(f"{family}.{key}")
        if value is not None:
            config[name] = max(value) if isinstance(value, list) else value
    if "vocab_size" not in config and isinstance(values.get("tokenizer.ggml.tokens"), list):
        config["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    if config.get("kv_lora_rank"):
        config["qk_rope_head_dim"] = config.pop("rope_dimension_count", 64)
    config.setdefault("torch_dtype", "float16")
    return config
