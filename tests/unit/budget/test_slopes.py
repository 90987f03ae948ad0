from __future__ import annotations

import pytest

from onebudget.budget.slopes import (
    attention_elements_per_token,
    kv_bytes_per_token,
    mla_elements_per_token,
    recurrent_cost,
    windowed_cost,
)
from onebudget.errors import ConfigError
from onebudget.units import GIB


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 40_960), ("fp8", 20_480), ("nvfp4", 11_520)])
def test_grouped_query_attention(dtype: str, nbytes: int) -> None:
    elements = attention_elements_per_token(layers=80, kv_heads=8, head_dim=128, tp_size=8)
    assert elements == 80 * 2 * 128 * 8 // 8
    assert kv_bytes_per_token(elements, dtype) == nbytes


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 70_272), ("fp8", 35_136), ("nvfp4", 19_764)])
def test_latent_attention(dtype: str, nbytes: int) -> None:
    elements = mla_elements_per_token(layers=61, kv_lora_rank=512, qk_rope_head_dim=64)
    assert elements == 61 * 576
    assert kv_bytes_per_token(elements, dtype) == nbytes


def test_odd_nvfp4_elements_round_up_twice() -> None:
    assert kv_bytes_per_token(17, "nvfp4") == 9 + 2


def test_attention_data_parallelism_keeps_all_heads() -> None:
    divided = attention_elements_per_token(layers=80, kv_heads=8, head_dim=128, tp_size=8)
    whole = attention_elements_per_token(layers=80, kv_heads=8, head_dim=128, tp_size=8, attention_dp=True)
    assert whole == 8 * divided


def test_a_rank_holds_at_least_one_head() -> None:
    assert attention_elements_per_token(layers=1, kv_heads=8, head_dim=128, tp_size=16) == 2 * 128


def test_heads_may_differ_by_layer() -> None:
    mixed = attention_elements_per_token(layers=3, kv_heads=[2, 4, 6], head_dim=64)
    assert mixed == attention_elements_per_token(layers=3, kv_heads=4, head_dim=64)


def test_an_empty_pipeline_rank_is_charged_one_layer() -> None:
    assert attention_elements_per_token(layers=0, kv_heads=8, head_dim=128) == 2 * 8 * 128
    assert mla_elements_per_token(layers=0, kv_lora_rank=512, qk_rope_head_dim=64) == 576


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="nvfp4"):
        kv_bytes_per_token(1, "fp3")


def test_hybrid_recurrent_model() -> None:
    cost = recurrent_cost(
        attention_bytes_per_token=49_152, state_bytes=10_321_920, max_batch_size=64, snapshot_interval=256
    )
    assert (cost.slope, cost.intercept) == (89_472, 660_602_880)
    assert cost.tokens_for_budget(10 * GIB) == 112_625


def test_recurrent_model_without_snapshots_on_two_stages() -> None:
    cost = recurrent_cost(attention_bytes_per_token=49_152, state_bytes=1_000, max_batch_size=4, pp_size=2)
    assert (cost.slope, cost.intercept) == (49_152, 8_000)


def test_windowed_layers_are_a_fixed_cost_of_whole_blocks() -> None:
    cost = windowed_cost(full_bytes_per_token=16_384, windows=[(1000, 81_920)], tokens_per_block=32, max_batch_size=4)
    assert (cost.slope, cost.intercept) == (16_384, 4 * 1024 * 81_920)
