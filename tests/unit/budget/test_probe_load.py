from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.cost import CacheCost
from onebudget.budget.probe_load import (
    ProbePool,
    Speculation,
    dummy_lengths,
    limit_probe_pool,
    probe_pool,
    resolve_probe_config,
)
from onebudget.config import BudgetConfig, resolve_max_seq_len
from onebudget.errors import BudgetError, ConfigError
from onebudget.units import GIB, MIB

WORKED = {"max_num_tokens": 8192, "max_seq_len": 4096, "tokens_per_block": 32, "max_batch_size": 256}
LENGTHS = [4095, 4095, 2]


def config(**knobs: Any) -> BudgetConfig:
    return BudgetConfig(**(WORKED | knobs))


def test_worked_dummies() -> None:
    assert dummy_lengths(max_num_tokens=8192, net_max_seq_len=4096) == LENGTHS


@pytest.mark.parametrize(
    ("tokens", "longest", "expected"),
    [(100, 4096, [100]), (8, 3, [2, 2, 2, 2]), (3, 1, [1, 1, 1]), (4095, 4096, [4095]), (4096, 4096, [4095, 1])],
)
def test_dummies_use_up_the_tokens(tokens: int, longest: int, expected: list[int]) -> None:
    assert dummy_lengths(max_num_tokens=tokens, net_max_seq_len=longest) == expected


def test_no_more_dummies_than_requests_in_a_step() -> None:
    assert dummy_lengths(max_num_tokens=100, net_max_seq_len=11, max_batch_size=3) == [10, 10, 10]


def test_data_parallel_ranks_each_take_a_share() -> None:
    assert dummy_lengths(max_num_tokens=8192, net_max_seq_len=4096, dp_size=2) == LENGTHS * 2


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_dummies_sum_to_the_step(tokens: int, longest: int) -> None:
    lengths = dummy_lengths(max_num_tokens=tokens, net_max_seq_len=longest)
    assert sum(lengths) == tokens
    assert all(1 <= length <= max(1, longest - 1) for length in lengths)


@pytest.mark.parametrize("bad", [{"max_num_tokens": 0}, {"net_max_seq_len": 0}])
def test_sizes_are_positive(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        dummy_lengths(**({"max_num_tokens": 1, "net_max_seq_len": 1} | bad))


@pytest.mark.parametrize(("manager", "groups", "tokens"), [("v1", 1, 8_224), ("v2", 2, 16_448), ("v1", 2, 8_224)])
def test_worked_pool(manager: str, groups: int, tokens: int) -> None:
    pool = probe_pool(LENGTHS, config(kv_cache_manager=manager), max_graph_batch_size=64, pool_groups=groups)
    assert pool.tokens == tokens
    assert pool.blocks * 32 == tokens


def test_each_arm_may_decide() -> None:
    assert probe_pool([1], config(max_batch_size=256)).blocks == 256
    assert probe_pool([1], config(max_batch_size=8), max_graph_batch_size=64).blocks == 129 + 8 - 1
    assert probe_pool(LENGTHS, config(max_batch_size=8)).blocks == 257


def test_data_parallel_dummies_are_shared_out() -> None:
    pool = probe_pool(LENGTHS * 2, config(max_batch_size=8), attention_dp_size=2)
    assert pool.dummy_blocks == 257


def test_speculative_tokens_lengthen_the_dummies() -> None:
    common = config(max_batch_size=1, tokens_per_block=1)
    spec = Speculation(tokens_per_step=4, extra_kv_tokens=2)
    assert probe_pool([100], common).dummy_blocks == 101
    assert probe_pool([100], common, overlap=True).dummy_blocks == 101
    assert probe_pool([100], common, speculation=spec).dummy_blocks == 106
    assert probe_pool([100], common, speculation=spec, overlap=True).dummy_blocks == 109


def test_free_memory_limits_v1_to_whole_blocks() -> None:
    pool, cost = ProbePool(8_224, 257, 100), CacheCost(40_960)
    free = 200 * 32 * 40_960 * 10 // 9 + 2
    assert limit_probe_pool(pool, config(), cost, free) == ProbePool(6_400, 200, 100)
    assert limit_probe_pool(pool, config(), cost, 80 * GIB) == pool
    assert limit_probe_pool(pool, config(kv_cache_manager="v2"), cost, free) == pool


def test_dummies_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"need 321\.25 MiB of KV cache, and 288\.00 MiB is usable"):
        limit_probe_pool(ProbePool(8_224, 257, 257), config(), CacheCost(40_960), 320 * MIB)


def test_the_users_token_cap_never_starves_the_probe() -> None:
    pool = probe_pool(LENGTHS, config(kv_max_tokens=64), max_graph_batch_size=64)
    assert pool.tokens == 8_224
    assert resolve_probe_config(config(kv_max_tokens=64), pool, free_bytes=GIB).config.kv_max_tokens == 8_224


def test_probe_settings_of_v1() -> None:
    user = config(pool_ratio=[0.25, 0.75], avg_seq_len=100, host_cache_bytes="1GiB", max_gpu_total_bytes="2GiB")
    probe = resolve_probe_config(user, ProbePool(8_224, 257, 257), free_bytes=GIB)
    changed = {item.knob: item.after for item in probe.adjustments}
    assert changed == {"pool_ratio": None, "avg_seq_len": 4096, "host_cache_bytes": 0, "kv_max_tokens": 8_224}
    assert probe.config.max_gpu_total_bytes == 2 * GIB


@pytest.mark.parametrize(("cap", "quota"), [(None, 900), (500, 500), (5000, 900)])
def test_v2_also_gets_a_quota(cap: int | None, quota: int) -> None:
    user = config(kv_cache_manager="v2", max_gpu_total_bytes=cap)
    probe = resolve_probe_config(user, ProbePool(8_224, 257, 257), free_bytes=1000).config
    assert (probe.max_gpu_total_bytes, probe.kv_max_tokens) == (quota, 8_224)


def test_v1_with_several_windows_is_sized_in_bytes() -> None:
    user = config(max_attention_window=[1024, 4096])
    probe = resolve_probe_config(user, ProbePool(8_224, 257, 257), free_bytes=1000).config
    assert (probe.max_gpu_total_bytes, probe.kv_max_tokens) == (900, None)


def test_the_users_settings_need_no_restoring() -> None:
    user = config(pool_ratio=[0.25, 0.75], avg_seq_len=100, kv_max_tokens=64, host_cache_bytes=5)
    copy = user.replace()
    probe = resolve_probe_config(user, ProbePool(1, 1, 1), free_bytes=GIB).config
    pool = probe_pool(LENGTHS, probe)
    with pytest.raises(BudgetError):
        limit_probe_pool(pool, probe, CacheCost(40_960), 1)
    assert probe != user
    assert user == copy
    assert user.given == copy.given


def test_a_shorter_manager_uses_its_own_length_as_average() -> None:
    shorter = resolve_max_seq_len(config(avg_seq_len=3000), 512).config
    probe = resolve_probe_config(shorter, ProbePool(8_224, 257, 257), free_bytes=GIB).config
    assert (probe.max_seq_len, probe.avg_seq_len) == (512, 512)
