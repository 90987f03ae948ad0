from __future__ import annotations

from fractions import Fraction

import pytest

from onebudget.budget.caps import list_caps, quota_from_tokens, v2_quota
from onebudget.budget.cost import CacheCost
from onebudget.config import BudgetConfig
from onebudget.errors import ConfigError
from onebudget.units import GIB

COST = CacheCost(40_960, 1000)


def test_only_the_fraction_without_hard_caps() -> None:
    (cap,) = list_caps(BudgetConfig(), COST, 5 * GIB)
    assert (cap.name, cap.value, cap.limit_bytes, cap.binding) == ("free_gpu_memory_fraction", 0.9, 5 * GIB, True)


def test_equal_limits_bind_together() -> None:
    caps = list_caps(BudgetConfig(max_gpu_total_bytes=GIB), COST, GIB)
    assert [cap.binding for cap in caps] == [True, True]


def test_v1_token_cap_goes_through_the_cost() -> None:
    caps = list_caps(BudgetConfig(kv_max_tokens=100), COST, GIB)
    assert caps[1].limit_bytes == 100 * 40_960 + 1000


def test_v2_token_cap_leaves_room_to_resume() -> None:
    assert quota_from_tokens(CacheCost(95), 10, Fraction("0.95")) == 1000
    assert quota_from_tokens(CacheCost(95), 11, Fraction("0.95")) == 1100
    assert quota_from_tokens(CacheCost(1), 1, Fraction("0.95")) == 2
    caps = list_caps(BudgetConfig(kv_max_tokens=10, kv_cache_manager="v2"), CacheCost(95), GIB)
    assert caps[1].limit_bytes == 1000


@pytest.mark.parametrize(
    ("knobs", "quota"),
    [
        ({"max_gpu_total_bytes": 999}, 999),
        ({"kv_max_tokens": 10}, 1000),
        ({"max_gpu_total_bytes": 999, "kv_max_tokens": 10}, 999),
        ({"max_gpu_total_bytes": 1001, "kv_max_tokens": 10}, 1000),
    ],
)
def test_v2_quota_is_the_lower_limit(knobs: dict[str, int], quota: int) -> None:
    assert v2_quota(BudgetConfig(kv_cache_manager="v2", **knobs), CacheCost(95)) == quota


def test_v2_needs_one_of_them() -> None:
    with pytest.raises(ConfigError, match="quota not set"):
        v2_quota(BudgetConfig(kv_cache_manager="v2"), COST)
