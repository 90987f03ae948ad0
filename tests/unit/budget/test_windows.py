from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.windows import (
    configured_shares,
    plan_windows,
    pool_shares,
    shares_for_average,
    shrink_windows,
    window_blocks,
)
from onebudget.config import BudgetConfig
from onebudget.errors import BudgetError, ConfigError
from onebudget.units import GIB, MIB

LAYERS = {1024: 81_920, 32_768: 16_384}


def test_worked_blocks_of_equal_shares() -> None:
    assert window_blocks(8 * GIB, LAYERS, 32) == {1024: 1_638, 32_768: 8_192}


def test_blocks_of_given_shares() -> None:
    shares = pool_shares(2, [0.25, 0.75])
    assert window_blocks(8 * GIB, LAYERS, 32, shares) == {1024: 819, 32_768: 12_288}


@pytest.mark.parametrize(("budget", "lengths"), [(256, {1024: 1024, 32_768: 11_264}), (64, {1024: 682, 32_768: 682})])
def test_worked_shrinking(budget: int, lengths: dict[int, int]) -> None:
    assert shrink_windows(budget * MIB, LAYERS) == lengths


def test_nothing_shrinks_when_all_fits() -> None:
    enough = 1024 * 81_920 + 32_768 * 16_384
    assert shrink_windows(enough, LAYERS) == {1024: 1024, 32_768: 32_768}
    assert shrink_windows(enough - 1, LAYERS) == {1024: 1024, 32_768: 32_767}


layers = st.dictionaries(st.integers(1, 5000), st.integers(1, 10**5), min_size=1, max_size=4)


@given(st.integers(0, 10**9), layers)
def test_shrunk_windows_fit_and_one_more_token_does_not(budget: int, per_token: dict[int, int]) -> None:
    lengths = shrink_windows(budget, per_token)
    used = sum(lengths[window] * per_token[window] for window in per_token)
    assert used <= budget
    assert all(lengths[window] <= window for window in per_token)
    cut = [window for window in per_token if lengths[window] < window]
    if cut:
        assert len({lengths[window] for window in cut}) == 1
        assert used + sum(per_token[window] for window in cut) > budget


@given(st.integers(0, 10**10), layers, st.sampled_from([1, 32, 128]))
def test_pools_never_exceed_the_budget(budget: int, per_token: dict[int, int], size: int) -> None:
    blocks = window_blocks(budget, per_token, size)
    assert sum(blocks[window] * size * per_token[window] for window in per_token) <= budget


@pytest.mark.parametrize("ratio", [[1.0], [0.5, 0.6], [0.5, 0.4], [1.5, -0.5], [0.3, 0.3, 0.4]])
def test_a_ratio_has_one_positive_share_for_each_pool(ratio: list[float]) -> None:
    with pytest.raises(ConfigError, match="pool_ratio"):
        pool_shares(2, ratio)


def test_equal_shares() -> None:
    assert pool_shares(3) == (Fraction(1, 3),) * 3


def test_shares_of_an_average_request() -> None:
    shares = shares_for_average(LAYERS, 2048, 32)
    windowed, full = 1024 * 81_920, 2048 * 16_384
    assert shares == (Fraction(windowed, windowed + full), Fraction(full, windowed + full))
    assert sum(shares_for_average(LAYERS, 100, 32)) == 1


def test_a_ratio_wins_over_an_average_length() -> None:
    common = {"max_seq_len": 32_768}
    assert configured_shares(BudgetConfig(**common), LAYERS) == pool_shares(2)
    average = BudgetConfig(**common, avg_seq_len=2048)
    assert configured_shares(average, LAYERS) == shares_for_average(LAYERS, 2048, 32)
    both = BudgetConfig(**common, avg_seq_len=2048, pool_ratio=[0.25, 0.75])
    assert configured_shares(both, LAYERS) == (Fraction(1, 4), Fraction(3, 4))


def test_a_plan_with_room() -> None:
    plan = plan_windows(8 * GIB, LAYERS, tokens_per_block=32, max_seq_len=32_768)
    assert plan.windows == {1024: 1024, 32_768: 32_768}
    assert (plan.max_seq_len, plan.warnings) == (32_768, ())


def test_a_window_larger_than_its_pool_is_clamped() -> None:
    plan = plan_windows(256 * MIB, LAYERS, tokens_per_block=32, max_seq_len=32_768)
    assert plan.blocks == {1024: 51, 32_768: 256}
    assert plan.windows == {1024: 1024, 32_768: 8_192}
    assert plan.max_seq_len == 8_192
    assert any("32768 is clamped to the 8192" in warning for warning in plan.warnings)
    assert any("lowered from 32768 to 8192" in warning for warning in plan.warnings)


def test_a_window_beyond_the_longest_request_need_not_fit() -> None:
    plan = plan_windows(256 * MIB, LAYERS, tokens_per_block=32, max_seq_len=4096)
    assert (plan.max_seq_len, plan.warnings) == (4096, ())


def test_an_empty_pool_is_an_error() -> None:
    with pytest.raises(BudgetError, match="window 1024"):
        plan_windows(2 * 32 * 81_920 - 1, LAYERS, tokens_per_block=32, max_seq_len=32_768)
    plan_windows(2 * 32 * 81_920, LAYERS, tokens_per_block=32, max_seq_len=32_768)
