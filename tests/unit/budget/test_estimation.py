from __future__ import annotations

from typing import Any

import pytest

from onebudget.budget.caps import v2_quota
from onebudget.budget.cost import CacheCost
from onebudget.budget.estimation import resolve_explicit_quota, why_estimation_is_off
from onebudget.config import BudgetConfig, resolve_environment
from onebudget.errors import ConfigError
from onebudget.units import GIB


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"context_parallel": "helix"}, "context parallelism"),
        ({"attention_backend": "VANILLA"}, "vanilla"),
        ({"encoder_decoder": True}, "encoder"),
    ],
)
def test_conditions_that_switch_the_probe_off(facts: dict[str, Any], word: str) -> None:
    assert word in str(why_estimation_is_off(BudgetConfig(), **facts))


@pytest.mark.parametrize(("value", "off"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_it_off(value: str, off: bool) -> None:
    config = resolve_environment(BudgetConfig(), {"ONEBUDGET_SKIP_KV_ESTIMATION": value}).config
    assert (why_estimation_is_off(config) is not None) == off


def test_the_probe_runs_otherwise() -> None:
    assert why_estimation_is_off(BudgetConfig(), attention_backend="gather") is None


@pytest.mark.parametrize("cap", [{"kv_max_tokens": 5}, {"max_gpu_total_bytes": 5}])
def test_a_given_cap_stands(cap: dict[str, int]) -> None:
    config = BudgetConfig(kv_cache_manager="v2", **cap)
    assert resolve_explicit_quota(config, GIB).config is config


def test_the_fraction_becomes_bytes_and_never_tokens() -> None:
    resolved = resolve_explicit_quota(BudgetConfig(kv_cache_manager="v2"), 10 * GIB)
    assert resolved.config.max_gpu_total_bytes == 9 * GIB
    assert resolved.config.kv_max_tokens is None
    assert v2_quota(resolved.config, CacheCost(40_960)) == 9 * GIB
    assert [item.knob for item in resolved.adjustments] == ["max_gpu_total_bytes"]


def test_nothing_free() -> None:
    with pytest.raises(ConfigError, match="0 bytes are free"):
        resolve_explicit_quota(BudgetConfig(kv_cache_manager="v2"), 0)


def test_v1_has_no_such_path() -> None:
    with pytest.raises(ConfigError, match="v2"):
        resolve_explicit_quota(BudgetConfig(), GIB)
