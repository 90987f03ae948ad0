from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.errors import ModelError
from onebudget.models.facts import DTYPE_BYTES, facts_from_config, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_a_llama() -> None:
    facts = facts_from_config(LLAMA, name="demo")
    assert (facts.name, facts.architecture) == ("demo", "LlamaForCausalLM")
    assert facts.layers == ("full",) * 30
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (9, 3, 64)
    assert (facts.hidden_size, facts.vocab_size, facts.max_position) == (576, 49152, 8192)
    assert (facts.tie_word_embeddings, facts.dtype, facts.sliding_window, facts.quantization) == (
        True,
        "bfloat16",
        None,
        None,
    )


@pytest.mark.parametrize(("dtype", "nbytes"), DTYPE_BYTES.items())
def test_cost_of_a_token(dtype: str, nbytes: int) -> None:
    """K and V of 30 layers, 3 heads of 64 elements: 11,520 elements."""
    cost = facts_from_config(LLAMA).cache_cost(dtype)
    assert (cost.slope, cost.intercept) == (11_520 * nbytes, 0)


def test_a_latent_is_cached_once_a_layer() -> None:
    facts = facts_from_config(DEEPSEEK)
    assert facts.layers == ("latent",) * 61
    assert facts.latent_dim == 576
    assert facts.cache_cost("bfloat16").slope == 61 * 576 * 2 == 70_272


def test_linear_layers_cache_nothing_per_token() -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 10
    facts = facts_from_config({**LLAMA, "layer_types": kinds})
    assert facts.layers.count("linear") == 20
    assert facts.kv_elements_per_token() == 10 * 2 * 3 * 64


def test_head_dim_and_kv_heads_have_defaults() -> None:
    assert facts_from_config({**LLAMA, "head_dim": 128}).head_dim == 128
    assert facts_from_config({**LLAMA, "head_dim": None}).head_dim == 64
    assert facts_from_config(without(LLAMA, "num_key_value_heads")).num_kv_heads == 9
    assert facts_from_config({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 9


@pytest.mark.parametrize(
    ("keys", "window", "layers"),
    [
        ({"sliding_window": 4096}, 4096, ("sliding",) * 2),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, ("full",) * 2),
        ({"sliding_window": None}, None, ("full",) * 2),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, 64, ("sliding", "full")),
    ],
)
def test_windows(keys: dict[str, Any], window: int | None, layers: tuple[str, ...]) -> None:
    facts = facts_from_config({**LLAMA, "num_hidden_layers": 2, **keys})
    assert (facts.sliding_window, facts.layers) == (window, layers)


@pytest.mark.parametrize("kind", ["conv", "something_new"])
def test_an_unknown_kind_of_layer_is_not_taken_for_a_known_one(kind: str) -> None:
    try:
        facts = facts_from_config({**LLAMA, "num_hidden_layers": 2, "layer_types": [kind, "full_attention"]})
    except ModelError:
        return
    assert facts.layers[0] != "full"


def test_the_language_model_of_a_multimodal_config() -> None:
    text = without(LLAMA, "architectures", "model_type", "tie_word_embeddings")
    whole = {"model_type": "vlm", "architectures": ["Vlm"], "text_config": text, "tie_word_embeddings": True}
    facts = facts_from_config({**whole, "vision_config": {"hidden_size": 9}})
    assert (facts.architecture, facts.hidden_size, facts.tie_word_embeddings) == ("Vlm", 576, True)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        facts_from_config(without(LLAMA, key), name="broken")


def test_quantization_is_seen_wherever_it_stands() -> None:
    settings = {"quantization_config": {"quant_method": "gptq"}}
    assert facts_from_config({**LLAMA, **settings}).quantization == "gptq"
    assert facts_from_config({"model_type": "vlm", "text_config": {**LLAMA, **settings}}).quantization == "gptq"
    assert facts_from_config({**LLAMA, "quantization_config": {"bits": 4}}).quantization == "unknown"


def test_dtype_of_older_configs() -> None:
    config = without(LLAMA, "dtype")
    assert facts_from_config({**config, "torch_dtype": "float16"}).dtype == "float16"
    assert facts_from_config({**config, "torch_dtype": "torch.float16"}).dtype == "float16"
    assert facts_from_config(config).dtype == "float32"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None), ("num_attention_heads", "four"), ("max_position_embeddings", "many"),
        ("layer_types", 5), ("quantization_config", "gptq"), ("num_hidden_layers", [2]),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_a_model_error(key: str, value: object) -> None:
    with pytest.raises(ModelError):
        facts_from_config({**LLAMA, key: value})


@given(layers=st.integers(1, 100), heads=st.integers(1, 64), group=st.integers(1, 16), head_dim=st.integers(1, 256))
def test_cost_is_two_rows_of_all_kv_heads_a_layer(layers: int, heads: int, group: int, head_dim: int) -> None:
    config = {
        **LLAMA, "num_hidden_layers": layers, "num_attention_heads": heads * group, "num_key_value_heads": heads,
        "head_dim": head_dim,
    }  # fmt: skip
    assert facts_from_config(config).cache_cost("float16").slope == 4 * layers * heads * head_dim


def test_read_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == LLAMA


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not readable JSON"), (b"\xff\xfe", "not readable JSON"), ("[1]", "model_type"), ("{}", "model_type"),
        ("3", "model_type"),
    ],
)  # fmt: skip
def test_a_config_that_is_none(tmp_path: Path, content: str | bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=says):
        read_config(tmp_path)


def test_a_folder_without_a_config_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds nothing"):
        read_config(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"holds weights\.bin"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_config(tmp_path / "gone")


def test_a_file_in_the_place_of_a_folder_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path / "config.json")
    assert "does not exist" not in str(refused.value)
