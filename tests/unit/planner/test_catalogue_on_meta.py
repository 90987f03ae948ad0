"""The catalogue's facts build the very models whose sizes are published, and the rule for weights agrees with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from onebudget.planner.catalogue.models import find_model, model_names
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.formats import FORMATS
from onebudget.planner.policies.weight_rules import Shard, rope_bytes, weights_on_rank

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ENCODER = ("visual", "vision", "audio", "projector", "embed_audio")
NO_CLASS = {  # transformers has no class for the family, or none that generates from text alone
    "microsoft/Phi-3-vision-128k-instruct", "Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen3-Omni-30B-A3B-Instruct",
}  # fmt: skip
PERMILLE = {  # parts that the rule does not know: learned positions, compressors, shared K and V, low-rank gates
    "facebook/opt-125m": 14, "deepseek-ai/DeepSeek-V4-Flash": 24, "google/gemma-4-31B-it": 22,
    "google/gemma-4-E2B": 12, "moonshotai/Kimi-Linear-48B-A3B-Instruct": 4,
}  # fmt: skip


def text_bytes(name: str) -> int:
    """16-bit bytes of all parameters but an encoder's, from the model itself without weights."""
    found = find_model(name)
    assert found is not None
    config = {key: value for key, value in copy.deepcopy(found[1]).items() if key != "quantization_config"}
    settings = transformers.CONFIG_MAPPING[config.pop("model_type")](**config)
    classes = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    kind = next(each for each in classes if type(settings) in each._model_mapping)
    with torch.device("meta"):
        module: Any = kind.from_config(settings, dtype=torch.bfloat16)
    distinct = {id(value): (key, value) for key, value in module.named_parameters()}
    return sum(2 * value.numel() for key, value in distinct.values() if not any(mark in key for mark in ENCODER))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 16_060_522_496),
        ("meta-llama/Llama-3.1-70B-Instruct", 141_107_412_992),
        ("Qwen/Qwen2.5-7B-Instruct", 15_231_233_024),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 93_405_585_408),
        ("google/gemma-2-9b-it", 18_483_411_968),
    ],
)
def test_published_totals(name: str, published: int) -> None:
    assert text_bytes(name) == published


@pytest.mark.parametrize("name", [name for name in model_names() if name not in NO_CLASS])
def test_the_rule_agrees_with_the_model(name: str) -> None:
    """Biases and the norms of heads are all it leaves out, where no other part is named above."""
    found = find_model(name)
    assert found is not None
    dims = dims_from_config(found[1], name)
    ruled = weights_on_rank(dims, FORMATS["bf16"], Shard(vision=False)).bytes - rope_bytes(dims)
    built = text_bytes(name)
    assert abs(ruled - built) * 1000 <= built * PERMILLE.get(name, 1)
