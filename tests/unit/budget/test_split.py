from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.cost import CacheCost
from onebudget.budget.split import (
    check_equal_quotas,
    resolve_cross_configs,
    resolve_draft_pool_ratio,
    split_budget,
    split_cross,
    split_for_helix,
    split_host_budget,
)
from onebudget.config import BudgetConfig
from onebudget.errors import BudgetError, ConfigError
from onebudget.units import GIB, MIB

TARGET, DRAFT = CacheCost(40_960, 2 * GIB), CacheCost(8_192, GIB // 4)


def test_by_slope() -> None:
    assert split_budget(10 * GIB, CacheCost(80), CacheCost(20)) == (8 * GIB, 2 * GIB)


def test_worked_split_gives_both_the_same_tokens() -> None:
    target, draft = split_budget(10 * GIB, TARGET, DRAFT)
    assert (target, draft) == (9_082_066_262, 1_655_351_978)
    assert TARGET.tokens_for_budget(target) == DRAFT.tokens_for_budget(draft) == 169_301


def test_worked_refinement() -> None:
    target = CacheCost(40_960, 2 * GIB, 600 * MIB, 700 * MIB)
    draft = CacheCost(8_192, GIB // 4, 100 * MIB, 120 * MIB)
    assert split_budget(10 * GIB, target, draft, max_batch_size=8) == (9_462_349_824, 1_275_068_416)
    unbounded = CacheCost(8_192, GIB // 4, 100 * MIB)
    assert split_budget(10 * GIB, target, unbounded) == (10 * GIB - 1_457_221_046, 1_457_221_046)


def test_the_draft_gets_one_quota_at_least() -> None:
    draft = CacheCost(1, 0, quota_per_request=600)
    assert split_budget(1000, CacheCost(1_000_000), draft) == (400, 600)


def test_the_target_keeps_one_quota() -> None:
    target = CacheCost(1, 0, quota_per_request=900)
    assert split_budget(1000, target, CacheCost(1)) == (900, 100)


def test_quotas_that_do_not_fit_together() -> None:
    with pytest.raises(BudgetError, match="quotas"):
        split_budget(1000, CacheCost(1, 0, None, 600), CacheCost(1, 0, None, 600))


def test_worked_helix_scales_the_draft_slope_only() -> None:
    assert split_for_helix(10 * GIB, TARGET, DRAFT, 4) == (6_770_538_724, 3_966_879_516)
    assert split_for_helix(10 * GIB, TARGET, DRAFT, 1) == split_budget(10 * GIB, TARGET, DRAFT)


def test_a_draft_that_costs_nothing_gets_nothing() -> None:
    assert split_budget(10 * GIB, TARGET, CacheCost(0)) == (10 * GIB, 0)
    assert split_budget(GIB, TARGET, CacheCost(0)) == (GIB, 0)


@pytest.mark.parametrize("total", [0, GIB, 2 * GIB + GIB // 4])
def test_fixed_parts_must_leave_something(total: int) -> None:
    with pytest.raises(BudgetError, match="max_batch_size"):
        split_budget(total, TARGET, DRAFT)


def test_fixed_parts_alone_may_use_everything_up() -> None:
    assert split_budget(30, CacheCost(0, 20), CacheCost(0, 10)) == (20, 10)
    with pytest.raises(BudgetError):
        split_budget(29, CacheCost(0, 20), CacheCost(0, 10))


@pytest.mark.parametrize(
    ("total", "target", "draft"),
    [
        (-1, CacheCost(1), CacheCost(1)),
        (GIB, CacheCost(-1), CacheCost(1)),
        (GIB, CacheCost(1), CacheCost(-1)),
        (GIB, CacheCost(1, -1), CacheCost(1)),
        (GIB, CacheCost(1), CacheCost(1, -1)),
        (GIB, CacheCost(1), CacheCost(1, 0, None, -1)),
    ],
)
def test_negative_costs_are_refused(total: int, target: CacheCost, draft: CacheCost) -> None:
    with pytest.raises(ConfigError):
        split_budget(total, target, draft)


sides = st.builds(
    CacheCost,
    st.integers(0, 10**5),
    st.integers(0, 10**9),
    st.none() | st.integers(0, 10**8),
    st.none() | st.integers(0, 10**8),
)


@given(st.integers(0, 10**11), sides, sides, st.none() | st.integers(1, 64))
def test_parts_make_up_the_whole(total: int, target: CacheCost, draft: CacheCost, batch: int | None) -> None:
    try:
        shares = split_budget(total, target, draft, max_batch_size=batch)
    except BudgetError:
        return
    assert sum(shares) == total
    assert min(shares) >= 0
    if draft.slope or draft.intercept:
        assert shares[0] >= target.intercept
        assert shares[1] >= draft.intercept


def test_host_tiers_are_split_by_slope_alone() -> None:
    assert split_host_budget(6 * GIB, TARGET, DRAFT).draft_bytes == GIB
    assert split_host_budget(6 * GIB, TARGET, DRAFT).warning is None


def test_a_host_tier_that_cannot_be_split_stays_with_the_target() -> None:
    split = split_host_budget(6 * GIB, TARGET, CacheCost(-8_192))
    assert (split.target_bytes, split.draft_bytes) == (6 * GIB, 0)
    assert split.warning
    assert "draft.slope" in split.warning


@pytest.mark.parametrize(("ratio", "windows", "after"), [([0.5, 0.5], None, (1.0,)), ([1.0], None, (1.0,))])
def test_ratio_of_a_draft_with_one_pool(ratio: list[float], windows: object, after: tuple[float, ...]) -> None:
    draft = BudgetConfig(pool_ratio=ratio, max_attention_window=windows)
    assert resolve_draft_pool_ratio(draft).config.pool_ratio == after


def test_ratio_of_a_draft_with_windows_stays() -> None:
    draft = BudgetConfig(pool_ratio=[0.5, 0.5], max_attention_window=[128, 2048])
    assert resolve_draft_pool_ratio(draft).config is draft
    assert resolve_draft_pool_ratio(BudgetConfig()).adjustments == ()


def test_two_engines_need_equal_quotas() -> None:
    check_equal_quotas([GIB, GIB])
    with pytest.raises(ConfigError, match="both engines"):
        check_equal_quotas([GIB, 2 * GIB])


@given(st.integers(0, 10**12), st.integers(1, 99))
def test_self_and_cross_make_up_the_whole(total: int, percent: int) -> None:
    own, cross = split_cross(total, percent / 100)
    assert own + cross == total
    assert cross == total * percent // 100


def test_cross_split_of_bytes_host_cache_and_fraction() -> None:
    config = BudgetConfig(max_gpu_total_bytes=1001, host_cache_bytes=77, cross_kv_fraction=0.3)
    own, cross = (resolved.config for resolved in resolve_cross_configs(config))
    assert (own.max_gpu_total_bytes, cross.max_gpu_total_bytes) == (701, 300)
    assert (own.host_cache_bytes, cross.host_cache_bytes) == (54, 23)
    assert own.free_fraction_exact + cross.free_fraction_exact == config.free_fraction_exact
    assert cross.free_gpu_memory_fraction == 0.27


@pytest.mark.parametrize("fraction", [None, 0, 1, 1.5])
def test_cross_share_is_required(fraction: float | None) -> None:
    with pytest.raises(ConfigError, match="cross_kv_fraction"):
        split_cross(GIB, fraction)
    with pytest.raises(ConfigError, match="cross_kv_fraction"):
        resolve_cross_configs(BudgetConfig())
