from __future__ import annotations

from typing import Any

import pytest

from onebudget.budget.capacity import check_pool_is_free, resolve_capacity
from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget
from onebudget.budget.ledger import Ledger
from onebudget.budget.profile import ProfileResult
from onebudget.config import BudgetConfig
from onebudget.errors import BudgetError
from onebudget.units import GIB


def derived(config: BudgetConfig) -> Ledger:
    profile = ProfileResult.without_probe(model_bytes=GIB, device_used_bytes=GIB)
    return derive_budget(config, profile, CacheCost(40_960), total_bytes=11 * GIB)


@pytest.mark.parametrize(
    ("knobs", "written"),
    [
        ({}, {"kv_max_tokens": 9 * GIB // 40_960}),
        ({"kv_max_tokens": 1000}, {}),
        ({"max_gpu_total_bytes": GIB}, {"kv_max_tokens": GIB // 40_960}),
        ({"kv_cache_manager": "v2"}, {"max_gpu_total_bytes": 9 * GIB}),
        ({"kv_cache_manager": "v2", "kv_max_tokens": 1000}, {"max_gpu_total_bytes": -(-1000 * 40_960 * 100 // 95)}),
        ({"max_attention_window": [128, 2048]}, {"max_gpu_total_bytes": 9 * GIB}),
    ],
)
def test_only_the_result_is_written_back(knobs: dict[str, Any], written: dict[str, int]) -> None:
    config = BudgetConfig(**knobs)
    after = resolve_capacity(config, derived(config)).config
    before = config.to_dict()
    assert {name: value for name, value in after.to_dict().items() if value != before[name]} == written


def test_v2_keeps_the_users_token_limit() -> None:
    config = BudgetConfig(kv_cache_manager="v2", kv_max_tokens=1000)
    assert resolve_capacity(config, derived(config)).config.kv_max_tokens == 1000


def test_a_pool_that_is_no_longer_free_is_refused_and_not_shrunk() -> None:
    ledger = derived(BudgetConfig())
    check_pool_is_free(ledger, ledger.kv_cache.bytes)
    with pytest.raises(BudgetError, match="1 B less") as caught:
        check_pool_is_free(ledger, ledger.kv_cache.bytes - 1)
    assert caught.value.ledger is ledger
