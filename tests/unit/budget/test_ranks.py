from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.cost import CacheCost
from onebudget.budget.ranks import (
    agree_on_quotas,
    agree_on_tokens,
    agree_on_window_blocks,
    host_tier_bytes,
    rank_lines,
)
from onebudget.errors import AgreementError
from onebudget.units import GIB

UTIL = Fraction("0.95")


def test_worked_quotas_of_two_pipeline_ranks() -> None:
    costs = [CacheCost(40_960), CacheCost(45_056)]
    agreement = agree_on_quotas([5 * GIB, 5 * GIB], costs, UTIL)
    assert agreement.tokens == (124_518, 113_198)
    assert (agreement.agreed_tokens, agreement.limiting_rank) == (113_198, 1)
    assert agreement.quotas == (4_880_621_137, 5_368_683_251)


def test_after_agreement_every_rank_holds_the_same_tokens() -> None:
    costs = [CacheCost(40_960), CacheCost(45_056)]
    agreement = agree_on_quotas([5 * GIB, 5 * GIB], costs, UTIL)
    usable = [int(quota * UTIL) for quota in agreement.quotas]
    assert [cost.tokens_for_budget(each) for cost, each in zip(costs, usable, strict=True)] == [113_198, 113_198]


def test_a_rank_without_token_cost_is_left_alone() -> None:
    agreement = agree_on_quotas([5 * GIB, GIB], [CacheCost(40_960), CacheCost(0, 77)], UTIL)
    assert agreement.tokens[1] is None
    assert agreement.quotas[1] == GIB
    alone = agree_on_quotas([GIB], [CacheCost(0)], UTIL)
    assert (alone.agreed_tokens, alone.quotas) == (None, (GIB,))


cost = st.builds(CacheCost, st.integers(0, 10**5), st.integers(0, 10**8))


@given(st.lists(st.tuples(st.integers(0, 10**11), cost), min_size=1, max_size=5), st.integers(50, 100))
def test_agreement_never_raises_a_quota_and_keeps_the_tokens(ranks: list[tuple[int, CacheCost]], util: int) -> None:
    share = Fraction(util, 100)
    quotas, costs = [quota for quota, _ in ranks], [each for _, each in ranks]
    agreement = agree_on_quotas(quotas, costs, share)
    for rank, (before, after) in enumerate(zip(quotas, agreement.quotas, strict=True)):
        assert after <= before
        if costs[rank].slope and agreement.agreed_tokens:
            assert costs[rank].tokens_for_budget(int(after * share)) == agreement.agreed_tokens


def test_v1_takes_the_smallest_count() -> None:
    assert agree_on_tokens([300, 200, 200]) == (200, 1)
    assert agree_on_tokens([None, 200]) == (200, 1)
    assert agree_on_tokens([None, None]) == (None, 0)
    with pytest.raises(AgreementError):
        agree_on_tokens([])


def test_windows_take_the_smallest_pool_each() -> None:
    assert agree_on_window_blocks([{1024: 5, 32_768: 9}, {1024: 7, 32_768: 8}]) == {1024: 5, 32_768: 8}


@pytest.mark.parametrize("blocks", [[], [{1024: 5}, {2048: 5}]])
def test_different_windows_cannot_agree(blocks: list[dict[int, int]]) -> None:
    with pytest.raises(AgreementError):
        agree_on_window_blocks(blocks)


@pytest.mark.parametrize(
    ("quota", "available", "ranks", "memlock", "expected"),
    [
        (10 * GIB, 64 * GIB, 2, None, 10 * GIB),
        (20 * GIB, 64 * GIB, 2, None, 16 * GIB),
        (20 * GIB, 64 * GIB, 2, 10 * GIB, 8 * GIB),
        (20 * GIB, 64 * GIB, 2, 100 * GIB, 16 * GIB),
    ],
)
def test_automatic_host_tier(quota: int, available: int, ranks: int, memlock: int | None, expected: int) -> None:
    nbytes = host_tier_bytes(
        device_quota_bytes=quota, host_available_bytes=available, ranks_on_node=ranks, memlock_limit_bytes=memlock
    )
    assert nbytes == expected


def test_lines_for_the_ledger() -> None:
    quotas = [5 * GIB, 5 * GIB]
    agreement = agree_on_quotas(quotas, [CacheCost(40_960), CacheCost(45_056)], UTIL)
    lines = rank_lines(agreement, quotas, [80 * GIB, 80 * GIB])
    assert [(line.rank, line.tokens, line.agreed_kv_bytes) for line in lines] == [
        (0, 124_518, 4_880_621_137),
        (1, 113_198, 5_368_683_251),
    ]
