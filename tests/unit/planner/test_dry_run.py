"""A few layers tell what all of them would, and closed forms tell nearly the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind, tiny_config
from onebudget.engine.dry_runs import WholeModel
from onebudget.errors import ModelError
from onebudget.models.facts import facts_from_config
from onebudget.planner.catalogue.models import find_model, model_names
from onebudget.planner.closed_form import closed_form_peak
from onebudget.planner.dry_run import FewLayers, few_layers, telling_layers
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.rank_config import config_of_rank
from onebudget.planner.weights import ParallelLayout

PAGE = 4096
LAYERS = 9
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_tokens": 8192, "max_seq_len": 8192},
    {"max_batch_size": 256, "max_num_tokens": 512},
]
FEW_MODELS = [
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-3-1b-it", "deepseek-ai/DeepSeek-V3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1", "microsoft/phi-4", "CohereForAI/c4ai-command-r-v01", "facebook/opt-125m",
    "Qwen/Qwen3-0.6B", "MiniMaxAI/MiniMax-M2.5",
]  # fmt: skip


def deep_config(kind: TinyKind) -> dict[str, Any]:
    """A tiny model of nine layers; kinds of layers as the architecture repeats them."""
    more: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if kind == "mixed":
        more["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    if kind == "mla":
        more["first_k_dense_replace"] = 4
    config: dict[str, Any] = json.loads(tiny_config(kind, **more).to_json_string(use_diff=False))
    return {**config, "architectures": None}


LARGE_STEPS = {"max_seq_len": 256, "max_num_tokens": 512}
SMALL_STEPS = {"max_seq_len": 128, "max_num_tokens": 48, "max_batch_size": 3, "tokens_per_block": 5}
QUOTA = {"max_seq_len": 256, "max_num_tokens": 96, "kv_cache_manager": "v2"}


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize(
    ("knobs", "dtype"),
    [
        (LARGE_STEPS, "float32"),
        (SMALL_STEPS, "bfloat16"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in [
            (LARGE_STEPS, "bfloat16"), (SMALL_STEPS, "float32"), (QUOTA, "float32"), (QUOTA, "bfloat16"),
        ]),
    ],
)  # fmt: skip
def test_few_layers_equal_all_layers(kind: TinyKind, dtype: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    config = BudgetConfig(**knobs)
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(deep_config(kind)))
    whole = WholeModel(folder, facts_from_config(deep_config(kind)))
    with few_layers(deep_config(kind), "tiny", dtype, PAGE) as few:
        assert few.layers_run < LAYERS
        assert few.profile(dtype, config) == whole.profile(dtype, config)
        assert few.graphs(dtype, config) == whole.graphs(dtype, config)


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [("", 0), ("a", 1), ("aaaa", 3), ("abbb", 3), ("aabb", 4), ("aaaab", 5), ("abab", 4), ("aaabcbb", 6)],
)
def test_every_kind_is_seen_behind_the_first_layer(kinds: str, layers: int) -> None:
    assert telling_layers(kinds) == layers


def test_a_config_nobody_can_build_is_the_models_affair() -> None:
    found = find_model("moonshotai/Kimi-K2.5")
    assert found is not None
    with pytest.raises(ModelError, match="transformers can't build"), few_layers(found[1], "", "bfloat16", PAGE):
        pass


def deviations(name: str, settings: list[dict[str, Any]]) -> list[float]:
    """By how much the closed form is off, per setting; empty where the model can't be run here."""
    found = find_model(name)
    assert found is not None
    dims = dims_from_config(found[1], name)
    try:
        with few_layers(config_of_rank(found[1], ParallelLayout()), name, "bfloat16", PAGE) as few:
            return [deviation(few, dims, BudgetConfig(**knobs)) for knobs in settings]
    except ModelError:
        return []


def deviation(few: FewLayers, dims: Dims, config: BudgetConfig) -> float:
    seen, told = few.profile("bfloat16", config), closed_form_peak(dims, config, 2)
    found_bytes = seen.activation_bytes - seen.allocated_bytes + seen.prompt_logits_bytes
    return (told.activation_bytes + told.prompt_logits_bytes) / found_bytes - 1


@pytest.mark.parametrize("name", FEW_MODELS)
def test_the_closed_form_is_near_the_dry_run(name: str) -> None:
    found = deviations(name, SETTINGS[:1])
    assert found
    assert all(abs(each) <= 0.10 for each in found), found


@pytest.mark.long
@pytest.mark.parametrize("name", model_names())
def test_the_closed_form_is_near_the_dry_run_of_every_model(name: str) -> None:
    assert all(abs(each) <= 0.10 for each in deviations(name, SETTINGS))


@pytest.mark.long
def test_most_of_the_catalogue_can_be_run_dry() -> None:
    assert sum(bool(deviations(name, SETTINGS[:1])) for name in model_names()) >= 60
