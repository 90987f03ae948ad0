"""How much host memory and disk the tiers of the cache take, and when there are none."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from onebudget.budget.ledger import HostLine
from onebudget.config import BudgetConfig
from onebudget.device.facts import DeviceFacts
from onebudget.engine.kv_cache import host_cache_bytes, host_lines, layer_groups, uses_tiers
from onebudget.errors import ConfigError
from onebudget.models.facts import ModelFacts
from onebudget.resources.kv.division import is_plain

GIB = 2**30
FACTS = DeviceFacts(
    name="card", total_bytes=80 * GIB, granularity_bytes=512, os_page_bytes=4096, pool_supported=True,
    vmm_supported=True, host_available_bytes=100 * GIB, memlock_limit_bytes=None,
)  # fmt: skip
MODEL = ModelFacts(
    name="model", architecture="A", layers=("sliding", "full", "sliding"), num_heads=4, num_kv_heads=2, head_dim=8,
    hidden_size=32, vocab_size=100, tie_word_embeddings=True, dtype="float32", max_position=1024, sliding_window=64,
)  # fmt: skip


def test_the_host_cache_is_divided_among_the_ranks_of_a_host() -> None:
    config = BudgetConfig(host_cache_bytes=40 * GIB)
    assert host_cache_bytes(config, FACTS, GIB, 1) == 40 * GIB
    assert host_cache_bytes(config, FACTS, GIB, 4) == 10 * GIB


def test_no_more_than_the_machine_has_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = BudgetConfig(host_cache_bytes=100 * GIB)
    with caplog.at_level(logging.WARNING):
        assert host_cache_bytes(config, FACTS, GIB, 2) == 50 * GIB
        assert not caplog.records
        assert host_cache_bytes(config.replace(host_cache_bytes=100 * GIB + 2), FACTS, GIB, 2) == 50 * GIB
    assert "50.00 GiB a rank" in caplog.text


def test_v2_takes_a_host_tier_of_its_own_accord_unless_told() -> None:
    v2 = BudgetConfig(kv_cache_manager="v2")
    assert host_cache_bytes(v2, FACTS, 8 * GIB, 1) == 8 * GIB
    assert host_cache_bytes(v2, FACTS, 80 * GIB, 1) == 50 * GIB
    assert host_cache_bytes(v2, FACTS, 80 * GIB, 2) == 25 * GIB
    assert host_cache_bytes(v2, replace(FACTS, memlock_limit_bytes=10 * GIB), 80 * GIB, 1) == 8 * GIB
    assert host_cache_bytes(v2, replace(FACTS, host_available_bytes=None), 80 * GIB, 1) == 0
    assert host_cache_bytes(v2.replace(host_cache_bytes=0), FACTS, 80 * GIB, 1) == 0


def test_lines_of_the_ledger() -> None:
    config = BudgetConfig(host_cache_bytes=GIB, disk_cache_bytes=3 * GIB)
    assert host_lines(config, FACTS, GIB, 1) == [
        HostLine("host_kv_tier", GIB, "rank"),
        HostLine("disk_kv_tier", 3 * GIB, "rank"),
    ]
    assert host_lines(BudgetConfig(), FACTS, GIB, 1) == []


def test_tiers_exist_where_something_goes_to_them() -> None:
    plain = layer_groups(replace(MODEL, layers=("full",) * 3), "float32", BudgetConfig(max_seq_len=256))
    windows = layer_groups(MODEL, "float32", BudgetConfig(max_seq_len=256))
    with_reuse, without = BudgetConfig(host_cache_bytes=GIB), BudgetConfig(enable_block_reuse=False)
    v2 = BudgetConfig(kv_cache_manager="v2")
    assert [uses_tiers(plain, config) for config in (with_reuse, without, v2)] == [True, False, True]
    assert [uses_tiers(windows, config) for config in (with_reuse, without, v2)] == [False, False, True]
    assert host_lines(with_reuse, FACTS, GIB, 1, windows) == []


def test_groups_of_a_model_with_windows() -> None:
    config = BudgetConfig(max_seq_len=256)
    groups = layer_groups(MODEL, "bfloat16", config)
    per_layer = 2 * 2 * 8 * 2
    assert [(group.window_tokens, group.layers, group.bytes_per_token) for group in groups] == [
        (None, (1,), per_layer),
        (64, (0, 2), 2 * per_layer),
    ]
    assert is_plain(layer_groups(MODEL, "bfloat16", config.replace(max_seq_len=64)))
    assert is_plain(layer_groups(replace(MODEL, ranks=2), "bfloat16", config))


def test_latent_layers_have_no_windows() -> None:
    latent = replace(MODEL, layers=("latent",), latent_dim=40, sliding_window=None)
    assert is_plain(layer_groups(latent, "float32", BudgetConfig()))
    with pytest.raises(ConfigError, match="max_attention_window"):
        layer_groups(latent, "float32", BudgetConfig(max_attention_window=[64]))
