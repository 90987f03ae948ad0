"""TensorRT-LLM's pools per attention window: blocks, tokens, requests at once and what is shortened, by manager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.trtllm_pools import WindowPools, by_window
from onebudget.planner.policies.vllm.groups import CachedLayer
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB, MIB

MIXED = WindowPools(
    bytes_per_token={1024: 81_920, 32_768: 16_384}, layers={1024: 20, 32_768: 4}, longest=32_768, block_tokens=32,
    max_batch_size=2048,
)  # fmt: skip
SECOND = replace(MIXED, v2=True)
REQUEST = 1024 * 81_920 + 32_768 * 16_384

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": True, "sliding_window": 1024,
    "layer_types": [("full_attention" if layer % 6 == 5 else "sliding_attention") for layer in range(34)],
}  # fmt: skip
LAYER = 4 * 256 * 2 * 2


def plan(config: dict[str, Any] | None = None, tp: int = 1, **settings: Any) -> Ledger:
    request = PlanRequest(
        model=ModelSource("gemma", config or GEMMA, "test"), gpu=find_gpu("H100-SXM-80GB"), n_gpus=tp,
        layout=ParallelLayout(tp=tp), engine_version="1.0.0", settings={"max_batch_size": 64, **settings},
    )  # fmt: skip
    return policy_for("trtllm").plan(request)


# -- the first manager --------------------------------------------------------------------------------------------


def test_v1_gives_every_window_an_equal_share_of_the_bytes() -> None:
    assert MIXED.blocks(8 * GIB) == {1024: 1638, 32_768: 8192}
    assert MIXED.tokens(8 * GIB) == 8192 * 32
    assert MIXED.concurrency(8 * GIB) == min(1638 / 32, 8192 / 1024)
    groups = list(MIXED.groups(8 * GIB))
    assert [(group.name, group.window, group.layers) for group in groups] == [
        ("full", None, 4), ("window 1024", 1024, 20),
    ]  # fmt: skip
    assert [group.bytes for group in groups] == [8192 * 32 * 16_384, 1638 * 32 * 81_920]


def test_v1_shortens_windows_that_exceed_their_pool_and_the_longest_request() -> None:
    assert MIXED.warnings(8 * GIB) == ()
    blocks = MIXED.blocks(256 * MIB)
    assert blocks == {1024: 51, 32_768: 256}
    (said,) = MIXED.warnings(256 * MIB)
    assert said.startswith(f"max_seq_len drops from 32768 to {255 * 32 + 1}")
    both = MIXED.warnings(128 * MIB)
    assert both[0] == f"Attention window 1024 is shortened to {24 * 32 + 1} tokens, as its pool is."
    assert len(both) == 2


def test_one_pool_of_82_blocks_holds_requests_of_5185_tokens() -> None:
    """As an engine with blocks of 64 tokens and 256 KiB per token said for a pool of 1.28 GiB."""
    plain = WindowPools(
        bytes_per_token={8192: 262_144}, layers={8192: 32}, longest=8192, block_tokens=64, max_batch_size=1
    )
    pool = 82 * 64 * 262_144
    assert plain.blocks(pool) == {8192: 82}
    assert "max_seq_len drops from 8192 to 5185" in plain.warnings(pool)[0]
    assert list(plain.groups(pool)) == []


# -- the second manager -------------------------------------------------------------------------------------------


def test_v2_charges_windows_by_request_and_the_rest_by_token() -> None:
    assert SECOND.request_fixed_bytes == 1024 * 81_920
    assert SECOND.request_bytes == REQUEST
    budget = 8 * GIB
    seats = budget // REQUEST
    assert SECOND.seats(budget) == seats == 13
    full = (budget - seats * 1024 * 81_920) // (16_384 * 32)
    assert SECOND.blocks(budget) == {1024: seats * 32, 32_768: full}
    assert SECOND.tokens(budget) == full * 32 >= seats * 32_768
    assert SECOND.fixed_bytes(budget) == seats * 1024 * 81_920
    assert SECOND.concurrency(budget) == budget / REQUEST
    assert SECOND.warnings(64 * MIB) == ()


def test_v2_charges_no_more_windows_than_requests_in_a_batch() -> None:
    few = replace(SECOND, max_batch_size=4)
    assert few.fixed_bytes(8 * GIB) == 4 * 1024 * 81_920
    assert few.tokens(8 * GIB) == (8 * GIB - 4 * 1024 * 81_920) // (16_384 * 32) * 32


def test_v2_rounds_windows_up_to_blocks() -> None:
    odd = replace(SECOND, bytes_per_token={1000: 10, 32_768: 1}, layers={1000: 1, 32_768: 1})
    assert odd.request_fixed_bytes == 1024 * 10


def test_v2_without_full_layers_is_bound_by_requests() -> None:
    windowed = replace(SECOND, bytes_per_token={1024: 81_920}, layers={1024: 20}, max_batch_size=100)
    request = 1024 * 81_920
    assert windowed.tokens(10 * request) == 10 * 32_768
    assert windowed.tokens(1000 * request) == 100 * 32_768
    assert windowed.blocks(10 * request) == {1024: 10 * 32}


@given(st.integers(0, 2**36), st.integers(1, 512), st.sampled_from([16, 32, 64]), st.booleans())
def test_pools_stay_within_their_bytes(nbytes: int, batch: int, block: int, second: bool) -> None:
    pools = replace(MIXED, max_batch_size=batch, block_tokens=block, v2=second)
    held = sum(group.bytes for group in pools.groups(nbytes))
    assert held <= nbytes or nbytes < pools.needed_bytes
    assert pools.tokens(nbytes + 2**20) >= 0


@given(st.integers(1, 10**7), st.integers(1, 4096))
def test_a_cap_in_tokens_is_that_many_tokens_in_whole_blocks(tokens: int, batch: int) -> None:
    pools = replace(SECOND, max_batch_size=batch)
    assert pools.tokens(pools.bytes_for(tokens)) == -(-tokens // 32) * 32


# -- plans --------------------------------------------------------------------------------------------------------


def test_a_windowed_model_has_a_group_for_every_window() -> None:
    for manager in ("v1", "v2"):
        ledger = plan(kv_cache_manager=manager)
        full, windowed = ledger.kv_cache.groups
        assert (full.layers, windowed.layers, windowed.window) == (5, 29, 1024)
        assert (full.bytes_per_token, windowed.bytes_per_token) == (5 * LAYER, 29 * LAYER)
        assert ledger.kv_cache.tokens == full.blocks * 32
        assert full.bytes + windowed.bytes <= ledger.kv_cache.bytes
    assert plan(kv_cache_manager="v2").kv_cache.bytes_per_token == 5 * LAYER
    assert plan(kv_cache_manager="v1").kv_cache.bytes_per_token == 34 * LAYER


def test_v2_holds_more_of_a_windowed_model_than_v1() -> None:
    first, second = (plan(kv_cache_manager=manager).kv_cache for manager in ("v1", "v2"))
    assert first.bytes == second.bytes
    assert second.max_concurrency_at_max_seq_len > first.max_concurrency_at_max_seq_len
    assert second.max_concurrency_at_max_seq_len == pytest.approx(
        second.bytes / (1024 * 29 * LAYER + 131072 * 5 * LAYER), abs=1e-4
    )


def test_windows_can_be_set_and_ranks_divide_them() -> None:
    whole = plan(max_attention_window=[131072])
    assert whole.kv_cache.groups == ()
    assert whole.kv_cache.bytes_per_token == 34 * LAYER
    repeated = plan(max_attention_window=[512, 131072])
    assert [(group.layers, group.window) for group in repeated.kv_cache.groups] == [(17, None), (17, 512)]
    assert plan(tp=2).kv_cache.groups[0].bytes_per_token == 5 * LAYER // 2
    with pytest.raises(ConfigError, match="max_attention_window"):
        plan(max_attention_window=[0])
    with pytest.raises(ConfigError, match="kv_cache_manager"):
        plan(kv_cache_manager="v3")


def test_windows_no_request_reaches_the_end_of_are_none() -> None:
    ledger = plan(max_seq_len=1024)
    assert ledger.kv_cache.groups == ()
    layers = [CachedLayer("sliding", 4, window=1024), CachedLayer("full", 4), CachedLayer("state", state_bytes=8)]
    assert {window: len(each) for window, each in by_window(layers, 1024).items()} == {1024: 2}
    assert {window: len(each) for window, each in by_window(layers, 4096).items()} == {1024: 1, 4096: 1}
