"""Layouts that no engine starts with are refused in one paragraph, whichever engine is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout

SHARED = ["sglang", "trtllm", "llamacpp"]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip


def request(layout: ParallelLayout, cards: int, **changes: Any) -> PlanRequest:
    return PlanRequest(
        model=ModelSource("llama", CONFIG, "test"), gpu=find_gpu("H100-SXM-80GB"), n_gpus=cards, layout=layout,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("engine", [*SHARED, "vllm"])
@pytest.mark.parametrize("tp", [3, 5, 6, 7])
def test_ranks_that_do_not_divide_the_heads_are_refused(engine: str, tp: int) -> None:
    with pytest.raises(ConfigError, match=f"tp = {tp} does not divide the 32") as caught:
        policy_for(engine).plan(request(ParallelLayout(tp=tp), tp))
    assert caught.value.field == "tp"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", SHARED)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_ranks_that_divide_the_heads_or_share_a_kv_head_are_taken(engine: str, tp: int) -> None:
    assert policy_for(engine).plan(request(ParallelLayout(tp=tp), tp)).fits


@pytest.mark.parametrize("engine", SHARED)
def test_stages_and_ranks_are_no_more_than_layers_and_cards(engine: str) -> None:
    with pytest.raises(ConfigError, match="pp = 33 is more than the model's 32 layers"):
        policy_for(engine).plan(request(ParallelLayout(pp=33), 33))
    with pytest.raises(ConfigError, match="needs 8 GPUs, there are 4"):
        policy_for(engine).plan(request(ParallelLayout(tp=4, pp=2), 4))


def test_latent_attention_divides_its_query_heads_only() -> None:
    config = CONFIG | {
        "num_attention_heads": 16, "num_key_value_heads": 6, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    asked = replace(request(ParallelLayout(tp=4), 4), model=ModelSource("latent", config, "test"))
    assert policy_for("sglang").plan(asked).fits
    with pytest.raises(ConfigError, match="tp = 3"):
        policy_for("sglang").plan(replace(asked, layout=ParallelLayout(tp=3), n_gpus=3))


def test_groups_of_attention_ranks_divide_the_heads_rather_than_all_ranks() -> None:
    settings = {"enable_dp_attention": True}
    asked = request(ParallelLayout(tp=12, dp=3), 12, settings=settings)
    assert policy_for("sglang").plan(asked).fits
    with pytest.raises(ConfigError, match="tp = 12"):
        policy_for("sglang").plan(replace(asked, settings={}))
