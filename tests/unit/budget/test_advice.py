from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from onebudget.budget.advice import Candidate
from onebudget.budget.context_workspace import ContextWorkspace
from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget
from onebudget.budget.ledger import Ledger
from onebudget.budget.profile import ProfileResult
from onebudget.budget.reserves import ReserveLine
from onebudget.config import BudgetConfig
from onebudget.errors import BudgetError
from onebudget.units import GIB, MIB

COST = CacheCost(40_960)
FULL = 4096 * 40_960


def failed(knobs: dict[str, Any] | None = None, *, left: int, **options: Any) -> tuple[str, Ledger]:
    """A derivation that must fail with ``left`` bytes left after a peak of 10 GiB."""
    config = BudgetConfig(**({"max_seq_len": 4096} | (knobs or {})))
    profile = ProfileResult.without_probe(model_bytes=10 * GIB, device_used_bytes=10 * GIB)
    with pytest.raises(BudgetError) as caught:
        derive_budget(config, profile, options.pop("cost", COST), total_bytes=10 * GIB + left, **options)
    assert caught.value.ledger is not None
    return str(caught.value), caught.value.ledger


def sets(ledger: Ledger) -> list[dict[str, Any]]:
    return [change.set for change in ledger.changes]


def test_message_has_need_available_largest_term_and_ways_out() -> None:
    message, ledger = failed({"max_gpu_total_bytes": MIB}, left=4 * GIB, reserves=[ReserveLine("lora", GIB)])
    for expected in (
        "max_seq_len 4096 needs 160.00 MiB",
        "1.00 MiB is available",
        "short by 159.00 MiB; max_gpu_total_bytes binds",
        "Of 14.00 GiB the peak takes 11.00 GiB, reserves: lora 1.00 GiB",
        "free_gpu_memory_fraction 0.9 applies",
        "largest term is weights with 10.00 GiB",
        f"max_gpu_total_bytes = {FULL}",
    ):
        assert expected in message
    assert "\n" not in message
    assert ledger.shortfall_bytes == FULL - MIB


def test_a_cap_that_is_too_low_is_lifted_as_far_as_needed() -> None:
    _, ledger = failed({"kv_max_tokens": 31}, left=4 * GIB)
    assert sets(ledger) == [{"kv_max_tokens": 4096}]
    assert ledger.changes[0].gains_bytes == FULL


def test_two_low_caps_are_lifted_together() -> None:
    _, ledger = failed({"kv_max_tokens": 31, "max_gpu_total_bytes": MIB}, left=4 * GIB)
    assert sets(ledger) == [{"max_gpu_total_bytes": FULL, "kv_max_tokens": 4096}]


def test_v2_token_cap_counts_its_headroom() -> None:
    _, ledger = failed({"kv_max_tokens": 30, "kv_cache_manager": "v2"}, left=4 * GIB)
    assert sets(ledger)[0]["kv_max_tokens"] <= 4096


def test_the_fraction_is_raised_no_further_than_needed() -> None:
    _, ledger = failed({"free_gpu_memory_fraction": 0.001}, left=GIB)
    assert sets(ledger) == [{"free_gpu_memory_fraction": 0.16}]
    _, tight = failed({"free_gpu_memory_fraction": 0.001}, left=FULL)
    assert sets(tight) == [{"free_gpu_memory_fraction": 0.99}]


def test_a_lower_reserve_for_context_is_offered() -> None:
    cost, workspace = CacheCost(40_960, GIB), ContextWorkspace(40_960, 2**21)
    budget = 2 * FULL + 3 * GIB // 2
    knobs = {"max_gpu_total_bytes": budget, "free_gpu_memory_fraction": 1}
    _, ledger = failed(knobs, left=budget, cost=cost, context_workspace=workspace)
    assert {"context_kv_len_cap": 4096} in sets(ledger)


def test_callers_candidates_bring_their_own_figures() -> None:
    calls = []

    def more(config: BudgetConfig) -> Iterable[Candidate]:
        calls.append(config)
        smaller = ProfileResult.without_probe(model_bytes=9 * GIB, device_used_bytes=9 * GIB)
        yield Candidate(set={"max_batch_size": 4}, profile=smaller)
        yield Candidate(set={"max_num_tokens": 1024}, profile=smaller)
        yield Candidate(set={"max_seq_len": 1024})
        yield Candidate(set={"device_memory": 12 * GIB}, total_bytes=12 * GIB)
        yield Candidate(set={"seed": 1}, cost=CacheCost(1), reserves=())

    _, ledger = failed(left=MIB, candidates=more)
    assert len(calls) == 1
    assert sets(ledger) == [{"max_num_tokens": 1024}, {"max_batch_size": 4}, {"seed": 1}, {"device_memory": 12 * GIB}]
    assert all(change.fits for change in ledger.changes)


def test_candidates_are_not_asked_when_all_is_well() -> None:
    def more(config: BudgetConfig) -> Iterable[Candidate]:
        raise AssertionError("nobody needs advice")

    profile = ProfileResult.without_probe(model_bytes=0, device_used_bytes=0)
    ledger = derive_budget(BudgetConfig(max_seq_len=32), profile, COST, total_bytes=GIB, candidates=more)
    assert ledger.changes == ()


def test_a_declared_device_may_grow() -> None:
    total = 10 * GIB + MIB
    config = BudgetConfig(max_seq_len=4096, device_memory=total)
    profile = ProfileResult.without_probe(model_bytes=10 * GIB, device_used_bytes=10 * GIB)
    with pytest.raises(BudgetError) as caught:
        derive_budget(config, profile, COST, total_bytes=total)
    ledger = caught.value.ledger
    assert ledger is not None
    assert sets(ledger) == [{"device_memory": total + ledger.shortfall_bytes}]
    assert ledger.shortfall_bytes == -(-FULL * 10 // 9) - MIB


def test_nothing_to_set_is_said_too() -> None:
    message, ledger = failed(left=-GIB)
    assert ledger.changes == ()
    assert "larger device" in message


def test_a_small_pool_is_told_how_to_hold_a_full_request() -> None:
    profile = ProfileResult.without_probe(model_bytes=0, device_used_bytes=0)
    config = BudgetConfig(max_seq_len=4096, free_gpu_memory_fraction=0.5)
    ledger = derive_budget(config, profile, COST, total_bytes=200 * MIB)
    assert ledger.fits
    assert sets(ledger) == [{"free_gpu_memory_fraction": 0.8}, {"max_seq_len": 2560}]
    assert "Cheapest ways out: free_gpu_memory_fraction = 0.8, or max_seq_len = 2560." in ledger.warnings[0]
