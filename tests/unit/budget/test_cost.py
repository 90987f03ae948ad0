from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.cost import CacheCost
from onebudget.errors import ConfigError
from onebudget.units import GIB

costs = st.builds(
    CacheCost,
    st.integers(1, 10**6),
    st.integers(0, 10**10),
    st.none() | st.integers(0, 10**9),
    st.none() | st.integers(0, 10**9),
)


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(2 * GIB, 0), (3 * GIB, 0), (3 * GIB + 40_959, 0), (3 * GIB + 40_960, 1), (10 * GIB, 183_500)],
)
def test_tokens_of_a_budget(budget: int, tokens: int) -> None:
    assert CacheCost(40_960, 3 * GIB).tokens_for_budget(budget) == tokens


def test_a_free_token_is_not_counted() -> None:
    assert CacheCost(0, 10).tokens_for_budget(10**12) == 0
    assert CacheCost(-1).tokens_for_budget(10**12) == 0


@given(costs, st.integers(0, 10**7))
def test_bytes_and_tokens_are_inverse(cost: CacheCost, tokens: int) -> None:
    assert cost.tokens_for_budget(cost.bytes_for_tokens(tokens)) == tokens
    assert cost.tokens_for_budget(cost.bytes_for_tokens(tokens + 1) - 1) == tokens


@given(costs, st.integers(0, 10**12), st.integers(0, 10**12))
def test_tokens_grow_with_the_budget(cost: CacheCost, budget: int, more: int) -> None:
    assert cost.tokens_for_budget(budget) <= cost.tokens_for_budget(budget + more)


def test_addition_drops_policy() -> None:
    total = CacheCost(3, 5, 7, 11) + CacheCost(10, 20, 30, 40)
    assert total == CacheCost(13, 25)
    assert CacheCost(13, 25) - CacheCost(3, 5) == CacheCost(10, 20)


@given(costs, st.integers(0, 64))
def test_scaling_touches_the_slope_only(cost: CacheCost, factor: int) -> None:
    scaled = cost.scaled(factor)
    assert scaled.slope == cost.slope * factor
    assert (scaled.intercept, scaled.bytes_per_request, scaled.quota_per_request) == (
        cost.intercept,
        cost.bytes_per_request,
        cost.quota_per_request,
    )


def test_scaling_by_a_fraction_rounds_up() -> None:
    assert CacheCost(10).scaled(Fraction(1, 3)).slope == 4
    assert CacheCost(9).scaled(Fraction(1, 3)).slope == 3


@pytest.mark.parametrize("factor", [-1, 0.5, True, Fraction(-1, 2)])
def test_scaling_refuses_what_is_no_exact_factor(factor: object) -> None:
    with pytest.raises(ConfigError):
        CacheCost(10).scaled(factor)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [3, None, (1, 2)])
def test_addition_with_a_foreign_type_is_left_to_the_other_side(other: object) -> None:
    assert CacheCost(1).__add__(other) is NotImplemented
    assert CacheCost(1).__sub__(other) is NotImplemented
    with pytest.raises(TypeError):
        CacheCost(1) + other


@pytest.mark.parametrize("raw", [40_960, (40_960, 0), CacheCost(40_960)])
def test_from_raw(raw: int | tuple[int, int] | CacheCost) -> None:
    assert CacheCost.from_raw(raw) == CacheCost(40_960)


@pytest.mark.parametrize("value", [1.5, "4", True, None])
def test_slope_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="slope"):
        CacheCost(value)  # type: ignore[arg-type]
