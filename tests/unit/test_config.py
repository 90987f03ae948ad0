from __future__ import annotations

import dataclasses
from decimal import Decimal
from fractions import Fraction

import pytest

from onebudget.config import (
    KNOBS,
    Adjustment,
    BudgetConfig,
    adjust,
    resolve_environment,
    resolve_max_seq_len,
)
from onebudget.errors import ConfigError

DEFAULTS = {
    "device_memory": None,
    "dtype": "auto",
    "max_gpu_total_bytes": None,
    "kv_max_tokens": None,
    "free_gpu_memory_fraction": 0.9,
    "max_seq_len": 2048,
    "max_batch_size": 8,
    "max_num_tokens": 2048,
    "max_beam_width": 1,
    "tokens_per_block": 32,
    "kv_cache_dtype": "auto",
    "kv_cache_manager": "v1",
    "enable_block_reuse": True,
    "enable_chunked_prefill": True,
    "context_kv_len_cap": None,
    "max_attention_window": None,
    "pool_ratio": None,
    "avg_seq_len": None,
    "cross_kv_fraction": None,
    "max_util_for_resume": 0.95,
    "host_cache_bytes": 0,
    "disk_cache_bytes": 0,
    "disk_cache_dir": None,
    "skip_estimation": False,
    "scheduler_policy": "guaranteed_no_evict",
    "batch_wait": None,
    "overlap": True,
    "enable_penalties": True,
    "seed": None,
}


def test_defaults_are_the_documented_ones() -> None:
    config = BudgetConfig()
    assert {name: config.to_dict()[name] for name in DEFAULTS} == DEFAULTS
    assert set(KNOBS) >= set(DEFAULTS)
    assert config.given == frozenset()


def test_sizes_accept_texts() -> None:
    config = BudgetConfig(max_gpu_total_bytes="1GiB", device_memory="80GB", host_cache_bytes="1.5MiB")
    assert config.max_gpu_total_bytes == 2**30
    assert config.device_memory == 80 * 10**9
    assert config.host_cache_bytes == 1_572_864


def test_texts_of_a_command_line_become_values() -> None:
    config = BudgetConfig(
        max_seq_len="4096",
        free_gpu_memory_fraction="0.85",
        enable_block_reuse="off",
        max_attention_window="1024,32768",
        pool_ratio="0.25, 0.75",
        kv_cache_manager="V2",
        dtype="bfloat16",
        context_kv_len_cap="none",
    )
    assert config.max_seq_len == 4096
    assert config.free_gpu_memory_fraction == 0.85
    assert config.enable_block_reuse is False
    assert config.max_attention_window == (1024, 32768)
    assert config.pool_ratio == (0.25, 0.75)
    assert (config.kv_cache_manager, config.dtype, config.context_kv_len_cap) == ("v2", "bf16", None)


@pytest.mark.parametrize("value", [0.9, "0.9", Decimal("0.9"), Fraction(9, 10)])
def test_fraction_is_an_exact_decimal(value: object) -> None:
    config = BudgetConfig(free_gpu_memory_fraction=value)
    assert config.free_fraction_exact == Fraction(9, 10)


def test_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BudgetConfig().max_seq_len = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        BudgetConfig(4096)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_seq_length", "max_seq_len"),
        ("free_memory_fraction", "free_gpu_memory_fraction"),
        ("kv_max_token", "kv_max_tokens"),
        ("max_batchsize", "max_batch_size"),
    ],
)
def test_unknown_knob_is_refused_with_near_matches(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BudgetConfig(**{name: 1})
    assert caught.value.field == name
    assert near in str(caught.value)


def test_unknown_knob_far_from_all_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tokens_per_block"):
        BudgetConfig(zzzz=1)


BAD = [
    ("free_gpu_memory_fraction", 0),
    ("free_gpu_memory_fraction", 1.0001),
    ("free_gpu_memory_fraction", -0.1),
    ("free_gpu_memory_fraction", float("nan")),
    ("free_gpu_memory_fraction", float("inf")),
    ("free_gpu_memory_fraction", None),
    ("max_gpu_total_bytes", 0),
    ("max_gpu_total_bytes", -1),
    ("max_gpu_total_bytes", "lots"),
    ("kv_max_tokens", 0),
    ("kv_max_tokens", -5),
    ("kv_max_tokens", 1.5),
    ("max_seq_len", 0),
    ("max_seq_len", None),
    ("max_batch_size", 0),
    ("max_batch_size", True),
    ("max_num_tokens", -1),
    ("max_beam_width", 2),
    ("tokens_per_block", 0),
    ("kv_cache_dtype", "fp3"),
    ("kv_cache_manager", "v3"),
    ("enable_block_reuse", "maybe"),
    ("context_kv_len_cap", -1),
    ("cuda_graph_batch_sizes", [0, 4]),
    ("max_attention_window", [1024, 0]),
    ("max_attention_window", []),
    ("pool_ratio", [0.5, 0.4]),
    ("pool_ratio", [1.5, -0.5]),
    ("avg_seq_len", 0),
    ("cross_kv_fraction", 1),
    ("cross_kv_fraction", 0),
    ("max_util_for_resume", 0),
    ("scheduler_policy", "first_come"),
    ("batch_wait", "0:0.5"),
    ("batch_wait", "8"),
    ("batch_wait", (4, 1.5)),
    ("host_cache_bytes", -1),
    ("host_cache_bytes", None),
    ("disk_cache_bytes", -1),
    ("disk_cache_dir", 5),
    ("dtype", "int3"),
    ("dtype", 16),
    ("seed", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_names_field_value_and_allowed_range(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        BudgetConfig(**{name: value})
    assert caught.value.field == name
    assert caught.value.allowed
    assert name in str(caught.value)
    assert caught.value.allowed in str(caught.value)


def test_every_knob_but_the_flags_has_a_refused_value_above() -> None:
    flags = {name for name, knob in KNOBS.items() if isinstance(knob.default, bool)}
    assert set(KNOBS) - flags - {"device_memory"} <= {name for name, _ in BAD}


def test_ratio_may_miss_one_by_a_millionth() -> None:
    assert BudgetConfig(pool_ratio=[0.3333333, 0.3333333, 0.3333333]).pool_ratio is not None
    with pytest.raises(ConfigError):
        BudgetConfig(pool_ratio=[0.333, 0.333, 0.333])


def test_token_cap_has_no_meaning_with_several_windows() -> None:
    with pytest.raises(ConfigError, match="max_gpu_total_bytes") as caught:
        BudgetConfig(max_seq_len=32768, max_attention_window=[1024, 32768], kv_max_tokens=4096)
    assert caught.value.field == "kv_max_tokens"
    # windows that both reach beyond max_seq_len are one and the same
    BudgetConfig(max_seq_len=1024, max_attention_window=[1024, 32768], kv_max_tokens=4096)
    BudgetConfig(max_seq_len=32768, max_attention_window=[1024, 32768], kv_max_tokens=4096, kv_cache_manager="v2")


def test_average_length_cannot_exceed_the_longest() -> None:
    with pytest.raises(ConfigError, match="max_seq_len"):
        BudgetConfig(max_seq_len=1024, avg_seq_len=1025)


def test_an_explicit_none_differs_from_not_given() -> None:
    assert "kv_max_tokens" in BudgetConfig(kv_max_tokens=None).given
    assert "kv_max_tokens" not in BudgetConfig().given
    assert BudgetConfig(kv_max_tokens=None) == BudgetConfig()


def test_replace_checks_keeps_what_was_given_and_leaves_the_original() -> None:
    config = BudgetConfig(max_seq_len=4096)
    other = config.replace(kv_max_tokens=64)
    assert (other.max_seq_len, other.kv_max_tokens, config.kv_max_tokens) == (4096, 64, None)
    assert other.given == {"max_seq_len", "kv_max_tokens"}
    with pytest.raises(ConfigError):
        config.replace(kv_max_tokens=0)


def test_adjust_lists_only_what_changes() -> None:
    config = BudgetConfig()
    same = adjust(config, Adjustment("max_seq_len", 2048, 2048, "nothing to do"))
    assert same.config is config
    assert same.adjustments == ()
    moved = adjust(config, Adjustment("max_seq_len", 2048, 512, "the model stops at 512"))
    assert moved.config.max_seq_len == 512
    assert str(moved.adjustments[0]) == "max_seq_len: 2048 -> 512 (the model stops at 512)"


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [(None, 8192, 2048), (None, 1024, 1024), (None, None, 2048), (4096, 8192, 4096), (9000, 8192, 8192)],
)
def test_longest_request_is_bounded_by_the_model(given: int | None, model: int | None, expected: int) -> None:
    config = BudgetConfig() if given is None else BudgetConfig(max_seq_len=given)
    resolved = resolve_max_seq_len(config, model)
    assert resolved.config.max_seq_len == expected
    assert bool(resolved.adjustments) == (expected != config.max_seq_len)


def test_average_length_follows_when_the_model_is_shorter() -> None:
    resolved = resolve_max_seq_len(BudgetConfig(max_seq_len=4096, avg_seq_len=3000), 1024)
    assert (resolved.config.max_seq_len, resolved.config.avg_seq_len) == (1024, 1024)
    assert [item.knob for item in resolved.adjustments] == ["max_seq_len", "avg_seq_len"]


def test_environment_fills_what_was_not_given() -> None:
    environ = {"ONEBUDGET_SKIP_KV_ESTIMATION": "1", "ONEBUDGET_CONTEXT_KV_LEN_CAP": "4096"}
    resolved = resolve_environment(BudgetConfig(), environ)
    assert resolved.config.skip_estimation is True
    assert resolved.config.context_kv_len_cap == 4096
    assert "ONEBUDGET_CONTEXT_KV_LEN_CAP" in str(resolved.adjustments[1])
    stays = resolve_environment(BudgetConfig(skip_estimation=False, context_kv_len_cap=1), environ)
    assert stays.config.skip_estimation is False
    assert stays.config.context_kv_len_cap == 1


def test_bad_environment_value_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match="ONEBUDGET_CONTEXT_KV_LEN_CAP"):
        resolve_environment(BudgetConfig(), {"ONEBUDGET_CONTEXT_KV_LEN_CAP": "many"})
