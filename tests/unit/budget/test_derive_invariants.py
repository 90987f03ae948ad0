"""What must hold for any card, model and settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onebudget.budget.advice import Candidate
from onebudget.budget.context_workspace import ContextWorkspace, context_workspace_reserve
from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget, divide
from onebudget.budget.ledger import Ledger
from onebudget.budget.partition import OUTSIDE_NAMES
from onebudget.budget.pool import missing_bytes
from onebudget.budget.profile import ProfileResult
from onebudget.budget.reserves import ReserveLine
from onebudget.budget.shares import Inputs
from onebudget.config import BudgetConfig
from onebudget.errors import BudgetError

many = settings(max_examples=max(500, settings().max_examples))
sizes = st.integers(0, 10**6)


@st.composite
def profiles(draw: st.DrawFn) -> ProfileResult:
    model, above, used, extra = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    return ProfileResult(
        model_bytes=model,
        torch_peak_bytes=model + above,
        torch_used_bytes=used,
        device_used_bytes=used + extra,
        allocated_bytes=draw(st.integers(0, above + extra)),
        kv_outside_allocator=draw(st.booleans()),
    )


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    knobs: dict[str, Any] = {
        "max_seq_len": draw(st.integers(1, 300)),
        "max_batch_size": draw(st.integers(1, 8)),
        "max_num_tokens": draw(st.integers(1, 300)),
        "tokens_per_block": draw(st.sampled_from([1, 8, 32, 7])),
        "free_gpu_memory_fraction": draw(st.integers(1, 100)) / 100,
        "kv_cache_manager": draw(st.sampled_from(["v1", "v2"])),
        "max_gpu_total_bytes": draw(st.none() | st.integers(1, 10**6)),
        "kv_max_tokens": draw(st.none() | st.integers(32, 2000)),
    }
    kinds = st.sampled_from(["adds_to_peak", "cuts_kv"])
    lines = st.builds(ReserveLine, st.sampled_from("abcd"), st.integers(0, 10**5), kinds)
    workspaces = st.builds(ContextWorkspace, st.integers(0, 500), st.none() | st.integers(0, 2000))
    profile = draw(profiles())
    return Inputs(
        config=BudgetConfig(**knobs),
        profile=profile,
        cost=CacheCost(draw(st.integers(0, 1000)), draw(st.just(0) | st.integers(0, 10**5))),
        total_bytes=max(profile.peak_bytes + 10**7 - draw(st.integers(0, 10**7 + 10**5)), 1),
        reserves=tuple(draw(st.lists(lines, max_size=4))),
        context_workspace=draw(st.none() | workspaces),
    )


def derived(given: Inputs, **options: Any) -> Ledger:
    """The ledger, whether or not the pool fits."""
    try:
        return derive_budget(
            given.config,
            given.profile,
            given.cost,
            given.reserves,
            total_bytes=given.total_bytes,
            context_workspace=given.context_workspace,
            **options,
        )
    except BudgetError as error:
        if error.ledger is None:
            raise
        return error.ledger


@many
@given(inputs(), st.dictionaries(st.sampled_from(OUTSIDE_NAMES), sizes), sizes)
def test_the_ledger_sums_whatever_happens(given: Inputs, outside: dict[str, int], logits: int) -> None:
    ledger = derived(given, outside=outside, logits_bytes=logits)
    total = sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes
    assert total == ledger.capacity_bytes == given.total_bytes
    assert Ledger.from_dict(ledger.to_dict()) == ledger
    if not ledger.fits:
        assert (ledger.kv_cache.bytes, ledger.kv_cache.tokens, ledger.kv_cache.blocks) == (0, 0, 0)
        assert ledger.shortfall_bytes == missing_bytes(given, divide(given)) > 0


@many
@given(inputs())
def test_the_pool_keeps_below_every_ceiling_and_beside_peak_and_cuts(given: Inputs) -> None:
    ledger = derived(given)
    assert all(ledger.kv_cache.bytes <= cap.limit_bytes for cap in ledger.caps if ledger.kv_cache.blocks)
    shares = divide(given)
    if ledger.fits:
        peak = shares.peak_bytes - given.profile.allocated_bytes
        assert ledger.kv_cache.bytes + shares.cut_bytes + peak <= given.total_bytes
    lowest = min(cap.limit_bytes for cap in ledger.caps)
    assert [cap.binding for cap in ledger.caps] == [cap.limit_bytes == lowest for cap in ledger.caps]


@many
@given(inputs(), st.integers(1, 10**6), st.integers(32, 2000))
def test_another_cap_never_raises_the_pool(given: Inputs, byte_cap: int, token_cap: int) -> None:
    before = derived(given).kv_cache.bytes
    for name, value in (("max_gpu_total_bytes", byte_cap), ("kv_max_tokens", token_cap)):
        present = getattr(given.config, name)
        lower = value if present is None else min(value, present)
        capped = dataclasses.replace(given, config=given.config.replace(**{name: lower}))
        assert derived(capped).kv_cache.bytes <= before


@many
@given(inputs(), st.integers(0, 10**6))
def test_a_larger_probe_pool_changes_nothing(given: Inputs, more: int) -> None:
    profile = dataclasses.replace(given.profile, kv_outside_allocator=False)
    given = dataclasses.replace(given, profile=profile)
    larger = dataclasses.replace(
        profile,
        torch_peak_bytes=profile.torch_peak_bytes + more,
        torch_used_bytes=profile.torch_used_bytes + more,
        device_used_bytes=profile.device_used_bytes + more,
        allocated_bytes=profile.allocated_bytes + more,
    )
    before, after = derived(given), derived(dataclasses.replace(given, profile=larger))
    assert before.kv_cache == after.kv_cache
    assert before.unassigned_bytes == after.unassigned_bytes
    assert [(term.name, term.bytes) for term in before.terms] == [(term.name, term.bytes) for term in after.terms]


@many
@given(st.integers(1, 10**12), st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**8))
def test_context_reserve_and_its_admission_cap_belong_together(budget: int, k: int, w: int, limit: int) -> None:
    reserve, cap = context_workspace_reserve(budget, k, w, limit)
    assert cap is not None
    assert cap * w <= reserve
    assert reserve < (cap + 1) * w or reserve == w * limit
    assert 0 <= reserve <= budget
    if reserve < w * limit:
        assert CacheCost(k).tokens_for_budget(budget - reserve) >= cap


@many
@given(inputs())
def test_the_shortfall_is_exactly_what_a_full_request_lacks(given: Inputs) -> None:
    missing = missing_bytes(given, divide(given))
    assume(missing > 0)

    def with_more(nbytes: int) -> Ledger:
        caps = {}
        if given.config.max_gpu_total_bytes is not None:
            caps["max_gpu_total_bytes"] = given.config.max_gpu_total_bytes + nbytes
        config = given.config.replace(kv_max_tokens=None, **caps)
        return derived(dataclasses.replace(given, config=config, total_bytes=given.total_bytes + nbytes))

    enough = with_more(missing)
    assert enough.fits
    assert enough.kv_cache.blocks >= given.config.blocks_per_max_request
    if given.config.kv_max_tokens is None and given.cost.slope > 0:
        assert with_more(missing - 1).kv_cache.blocks < given.config.blocks_per_max_request


@many
@given(inputs())
def test_changes_do_what_they_promise(given: Inputs) -> None:
    before = derived(given)
    for change in before.changes:
        workspace = given.context_workspace
        if workspace and "context_kv_len_cap" in change.set:
            workspace = dataclasses.replace(workspace, kv_len_cap=change.set["context_kv_len_cap"])
        config = given.config.replace(**change.set)
        after = derived(dataclasses.replace(given, config=config, context_workspace=workspace))
        assert after.fits == change.fits
        assert change.fits
        assert max(after.kv_cache.bytes - before.kv_cache.bytes, 0) == change.gains_bytes
        if before.fits:
            assert after.kv_cache.blocks >= config.blocks_per_max_request


@many
@given(inputs(), st.booleans())
def test_deriving_leaves_the_settings_alone(given: Inputs, offer: bool) -> None:
    copy = given.config.replace()

    def candidates(config: BudgetConfig) -> list[Candidate]:
        return [Candidate(set={"max_batch_size": 1})] if offer else []

    derived(given, candidates=candidates)
    assert given.config == copy
    assert given.config.given == copy.given
