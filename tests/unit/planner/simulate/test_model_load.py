from __future__ import annotations

import pytest

from onebudget.budget.ledger import KVCacheLine, KVGroup, Ledger
from onebudget.config import BudgetConfig
from onebudget.errors import ConfigError
from onebudget.planner.simulate import CountedPool, StepLoad, load_of_gpu, load_of_model, pools_of_ledger, roofline
from onebudget.planner.source import ModelSource

DENSE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1000,
}  # fmt: skip
EXPERTS = {**DENSE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def load(config: dict[str, object]) -> StepLoad:
    return load_of_model(ModelSource("tiny", config, "test"))[0]


def test_a_dense_model_meets_all_its_weights_but_the_embedding() -> None:
    attention = 2 * 64 * 64 + 2 * 64 * 16
    layers = 3 * (attention + 3 * 64 * 160 + 2 * 64)
    dense = load(DENSE)
    assert dense.parameters == layers + 1024 * 64  # the head's rows are padded to 64
    assert dense.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2
    assert dense.flops_per_attended_pair == 3 * 4 * 8 * 8
    assert dense.weight_bytes is not None and dense.weight_bytes > 2 * dense.parameters


def test_a_token_meets_only_the_experts_it_is_sent_to() -> None:
    both, fewer = load(EXPERTS), load({**EXPERTS, "num_experts_per_tok": 1})
    assert both.parameters is not None and fewer.parameters is not None
    assert both.parameters - fewer.parameters == 3 * (3 * 64 * 160 + 64)  # an expert, and its column of the router
    assert both.weight_bytes == fewer.weight_bytes


def test_heads_of_a_latent_cache_read_the_whole_latent() -> None:
    latent = {**DENSE, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    assert load(latent).kv_bytes_per_token == 3 * 40 * 2
    assert load(latent).flops_per_attended_pair == 3 * 2 * 8 * (40 + 32)


def test_windows_are_spoken_of() -> None:
    _, notes = load_of_model(ModelSource("tiny", {**DENSE, "model_type": "mistral", "sliding_window": 16}, "test"))
    assert len(notes) == 1


def test_what_is_given_stands_over_what_is_known() -> None:
    known = StepLoad(gpu="A", weight_bytes=1, kv_bytes_per_token=2)
    assert known.beneath(StepLoad(weight_bytes=3)) == StepLoad(gpu="A", weight_bytes=3, kv_bytes_per_token=2)
    assert known.beneath(StepLoad(gpu="B")).gpu == "B"


def test_what_had_to_be_assumed_is_said() -> None:
    bare = StepLoad(weight_bytes=2_000, kv_bytes_per_token=10, bandwidth_bytes_per_s=1, peak_flops=1.0)
    clock, notes = roofline(bare)
    assert (clock.flops_per_token, clock.flops_per_attended_pair, len(notes)) == (2_000, 40, 2)
    assert roofline(bare.beneath(StepLoad(parameters=5, flops_per_attended_pair=7)))[1] == ()


def test_cards_of_the_catalogue() -> None:
    card = load_of_gpu("H100", known=StepLoad())
    assert card.bandwidth_bytes_per_s == 3_352 * 10**9
    assert card.peak_flops == pytest.approx(989e12, rel=0.001)
    with pytest.raises(ConfigError, match="No card"):
        load_of_gpu("Abacus", known=StepLoad())
    known = StepLoad(bandwidth_bytes_per_s=1, peak_flops=1.0)
    assert load_of_gpu("Abacus", known=known) == StepLoad(gpu="Abacus")


def ledger(**cache: object) -> Ledger:
    line = KVCacheLine(
        **{"bytes": 1000, "tokens": 100, "blocks": 3, "tokens_per_block": 32, "bytes_per_token": 10, **cache}
    )
    return Ledger(capacity_bytes=1000, terms=(), kv_cache=line)


def test_pools_of_a_ledger_in_blocks_of_another_size() -> None:
    config = BudgetConfig(max_seq_len=64, tokens_per_block=32)
    assert pools_of_ledger(ledger(), config) == (CountedPool(3, None, 10),)
    assert pools_of_ledger(ledger(), config.replace(tokens_per_block=10)) == (CountedPool(10, None, 10),)


def test_a_pool_per_window() -> None:
    groups = (KVGroup("full", 640, 2, 10), KVGroup("window 16", 320, 4, 5, window=16))
    pools = pools_of_ledger(ledger(groups=groups), BudgetConfig(max_seq_len=64, tokens_per_block=16))
    assert pools == (CountedPool(4, None, 10), CountedPool(8, 16, 5))


def test_a_ledger_without_a_cache_serves_nobody() -> None:
    empty = Ledger(capacity_bytes=0, terms=(), fits=False, shortfall_bytes=12_345)
    with pytest.raises(ConfigError, match="12,345 bytes are missing"):
        pools_of_ledger(empty, BudgetConfig(max_seq_len=64))
