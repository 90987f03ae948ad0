from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from onebudget.budget.context_workspace import ContextWorkspace, context_workspace_for
from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget
from onebudget.budget.ledger import Ledger
from onebudget.budget.profile import ProfileResult
from onebudget.config import BudgetConfig
from onebudget.report.context_cap import EXPLANATION, CapPoint, cap_points, cap_table
from onebudget.report.document import check_document
from onebudget.units import GIB

NOTHING = ProfileResult(model_bytes=0, torch_peak_bytes=0, torch_used_bytes=0, device_used_bytes=0)


def ledger(
    override: int | None = None, *, total_bytes: int = 20 * GIB, cost: CacheCost | None = None, **knobs: Any
) -> Ledger:
    """61 layers of 576 FP8 elements against 128 heads of 320, in 20 GiB, for up to 64 prompts of 32 768 tokens."""
    settings = {
        "max_seq_len": 32768, "max_batch_size": 64, "max_num_tokens": 8192, "free_gpu_memory_fraction": 1.0,
        "context_kv_len_cap": override, **knobs,
    }  # fmt: skip
    config = BudgetConfig(**settings)
    workspace = context_workspace_for(config, 40_960, chunk_bounded=False)
    cost = cost or CacheCost(35_136)
    return derive_budget(config, NOTHING, cost, total_bytes=total_bytes, context_workspace=workspace)


def points(ledger: Ledger, most: int = 10) -> tuple[CapPoint, ...]:
    return cap_points(check_document(json.loads(json.dumps(ledger.to_dict()))), most=most)


def test_the_ledger_keeps_what_the_division_was_made_from() -> None:
    line = ledger(100_000).context_workspace
    assert line is not None
    assert (line.shared_bytes, line.bytes_per_token, line.kv_len_cap) == (20 * GIB, 40_960, 100_000)
    assert (line.max_seq_len, line.requests_per_step) == (32_768, 64)


def test_other_cuts_and_caps_are_taken_off_before() -> None:
    capped = ledger(max_gpu_total_bytes="8GiB").context_workspace
    assert capped is not None and capped.shared_bytes == 8 * GIB


@pytest.mark.parametrize(("override", "cap", "kv_tokens"), [
    (None, 282_207, 282_207), (1_000, 32_768, 572_992), (100_000, 100_000, 494_616), (10**9, 282_207, 282_207),
])  # fmt: skip
def test_the_chosen_point_is_what_the_ledger_says(override: int | None, cap: int, kv_tokens: int) -> None:
    """Worked: a cap as wide as can be, one at its floor of one request, one between, one above the worst case."""
    derived = ledger(override)
    (chosen,) = [point for point in points(derived) if point.chosen]
    assert (chosen.attended_tokens_cap, chosen.kv_tokens) == (cap, kv_tokens)
    assert chosen.kv_tokens == derived.kv_cache.tokens
    assert chosen.kv_bytes == derived.kv_cache.bytes
    assert chosen.workspace_bytes == derived.term("context_workspace").bytes


def test_the_curve_goes_from_one_request_to_where_the_demands_meet() -> None:
    """282 207 tokens are 8 whole requests of 32 768; 64 of them one, two, or eight at a time."""
    curve = points(ledger())
    assert [point.attended_tokens_cap for point in curve] == [*(32_768 * count for count in range(1, 9)), 282_207]
    assert [point.prompts_at_once for point in curve] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert [point.steps_for_a_batch for point in curve] == [64, 32, 22, 16, 13, 11, 10, 8, 8]


def test_the_curve_stops_where_nobody_is_held_back() -> None:
    curve = points(ledger(max_batch_size=3))
    assert [point.attended_tokens_cap for point in curve] == [32_768, 65_536, 98_304]
    assert curve[-1].chosen and curve[-1].steps_for_a_batch == 1


def test_a_budget_below_one_request_has_one_point() -> None:
    (only,) = points(ledger(total_bytes=GIB))
    assert only.chosen and only.attended_tokens_cap == GIB // (40_960 + 35_136) == 14_110
    assert (only.prompts_at_once, only.steps_for_a_batch) == (1, 64)


def test_fixed_bytes_hold_no_tokens() -> None:
    derived = ledger(cost=CacheCost(35_136, GIB))
    (chosen,) = [point for point in points(derived) if point.chosen]
    assert chosen.kv_tokens == derived.kv_cache.tokens < 282_207


@given(
    budget=st.integers(2**22, 2**34),
    slope=st.integers(1, 10**5),
    rate=st.integers(1, 10**5),
    seq=st.integers(1, 4096),
    batch=st.integers(1, 128),
    override=st.none() | st.integers(0, 10**6),
    most=st.integers(1, 80),
)
def test_every_curve_falls_and_marks_one_point(
    budget: int, slope: int, rate: int, seq: int, batch: int, override: int | None, most: int
) -> None:
    config = BudgetConfig(
        max_seq_len=seq, max_batch_size=batch, max_num_tokens=4096, free_gpu_memory_fraction=1.0,
        context_kv_len_cap=override,
    )  # fmt: skip
    workspace = context_workspace_for(config, rate, chunk_bounded=False)
    try:
        derived = derive_budget(config, NOTHING, CacheCost(slope), total_bytes=budget, context_workspace=workspace)
    except MemoryError:
        return
    curve = points(derived, most)
    assert 1 <= len(curve) <= most + 3
    assert sum(point.chosen for point in curve) == 1
    for before, after in itertools.pairwise(curve):
        assert before.attended_tokens_cap < after.attended_tokens_cap
        assert before.kv_tokens >= after.kv_tokens
        assert before.steps_for_a_batch >= after.steps_for_a_batch
    for point in curve:
        assert point.kv_bytes + point.workspace_bytes == budget
        assert point.workspace_bytes >= point.attended_tokens_cap * rate


def test_ledgers_without_such_a_workspace_have_no_curve(run_document: dict[str, Any]) -> None:
    assert cap_points(run_document, most=10) == ()
    config = BudgetConfig(max_seq_len=64, max_batch_size=2, max_num_tokens=64)
    bounded = ContextWorkspace(bytes_per_token=640, kv_len_cap=None)
    derived = derive_budget(config, NOTHING, CacheCost(64), total_bytes=GIB, context_workspace=bounded)
    assert derived.context_workspace is None and points(derived) == ()


def test_the_table_has_a_bar_for_every_cap() -> None:
    console = Console(width=120, record=True, force_terminal=False)
    console.print(cap_table(points(ledger(100_000))))
    lines = console.export_text().splitlines()
    rows = [line for line in lines if "\u2588" in line]
    lengths = [line.count("\u2588") for line in rows]
    assert len(rows) == 10 and lengths[0] == 28 and lengths == sorted(lengths, reverse=True)
    (chosen,) = [line for line in rows if "chosen" in line]
    assert chosen.split()[:3] == ["100,000", "3", "22"]
    assert "494,616" in chosen
    assert EXPLANATION.split(":")[0] in " ".join(lines)
