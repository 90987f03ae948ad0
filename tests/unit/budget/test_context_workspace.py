from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.context_workspace import (
    ContextWorkspace,
    attended_tokens,
    context_cap_applies,
    context_kv_len_cap,
    context_workspace_for,
    context_workspace_line,
    context_workspace_reserve,
    keep_prefix_within_cap,
)
from onebudget.config import BudgetConfig
from onebudget.errors import ConfigError
from onebudget.units import GIB

WORKED = [
    (None, 2_097_152, 11_559_205_506, 282_207, 9_915_630_974, 282_207),
    (1_000, 32_768, 1_342_177_280, 32_768, 20_132_659_200, 572_992),
    (100_000, 100_000, 4_096_000_000, 100_000, 17_378_836_480, 494_616),
    (10**9, 2_097_152, 11_559_205_506, 282_207, 9_915_630_974, 282_207),
]


@pytest.mark.parametrize(("override", "limit", "reserve", "cap", "kv_bytes", "kv_tokens"), WORKED)
def test_worked_split(override: int | None, limit: int, reserve: int, cap: int, kv_bytes: int, kv_tokens: int) -> None:
    length = context_kv_len_cap(max_batch_size=64, max_num_tokens=8192, max_seq_len=32_768, override=override)
    assert length == limit
    assert context_workspace_reserve(20 * GIB, 35_136, 40_960, length) == (reserve, cap)
    assert 20 * GIB - reserve == kv_bytes
    assert kv_bytes // 35_136 == kv_tokens


def test_a_step_has_no_more_requests_than_tokens() -> None:
    assert context_kv_len_cap(max_batch_size=64, max_num_tokens=3, max_seq_len=100) == 300


def test_negative_override() -> None:
    with pytest.raises(ConfigError):
        context_kv_len_cap(max_batch_size=1, max_num_tokens=1, max_seq_len=1, override=-1)


@pytest.mark.parametrize("missing", range(4))
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_to_reserve(missing: int, value: int) -> None:
    arguments = [20 * GIB, 35_136, 40_960, 100_000]
    arguments[missing] = value
    assert context_workspace_reserve(*arguments) == (0, None)


def test_no_limit_no_reserve() -> None:
    assert context_workspace_reserve(20 * GIB, 35_136, 40_960, None) == (0, None)
    assert context_workspace_line(20 * GIB, 35_136, ContextWorkspace(40_960, None)) == ()
    assert context_workspace_line(20 * GIB, 35_136, None) == ()


def test_a_tiny_budget_admits_one_request_at_a_time() -> None:
    reserve, cap = context_workspace_reserve(100, 35_136, 40_960, 100_000)
    assert cap == 0
    assert reserve == 100 * 40_960 // 76_096


def test_the_line_carries_bytes_cap_and_formula() -> None:
    (line,) = context_workspace_line(20 * GIB, 35_136, ContextWorkspace(40_960, 100_000))
    assert (line.name, line.bytes, line.kind) == ("context_workspace", 4_096_000_000, "cuts_kv")
    assert line.admission_cap_tokens == 100_000
    assert "40960" in line.reason


@pytest.mark.parametrize(
    ("reuse", "chunked", "bounded", "required", "profiled"), list(product([False, True], repeat=5))
)
def test_when_the_workspace_must_be_reserved(
    reuse: bool, chunked: bool, bounded: bool, required: bool, profiled: bool
) -> None:
    expected = (
        (reuse and not chunked) or (chunked and not bounded) or (required and chunked and bounded and not profiled)
    )
    assert expected == context_cap_applies(
        block_reuse=reuse,
        chunked=chunked,
        chunk_bounded=bounded,
        require_chunked_profile=required,
        chunked_path_profiled=profiled,
    )


def test_a_declaration_becomes_a_workspace_under_the_settings() -> None:
    config = BudgetConfig(max_seq_len=32_768, max_batch_size=64, max_num_tokens=8192, context_kv_len_cap=100_000)
    assert context_workspace_for(config, 640, chunk_bounded=False) == ContextWorkspace(640, 100_000)
    assert context_workspace_for(config, 640) is None
    assert context_workspace_for(config, 0, chunk_bounded=False) is None
    unchunked = config.replace(enable_chunked_prefill=False, context_kv_len_cap=None)
    assert context_workspace_for(unchunked, 640) == ContextWorkspace(640, 2_097_152)
    assert context_workspace_for(unchunked.replace(enable_block_reuse=False), 640) is None


@pytest.mark.parametrize(
    ("position", "first", "reusable", "chunk", "prompt", "attended"),
    [
        (0, True, 100, 50, 150, 150),
        (100, True, 100, 50, 150, 150),
        (0, True, 0, 80, 80, 80),
        (200, False, 0, 100, 500, 300),
        (0, True, 999, 50, 150, 150),
        (200, False, 999, 100, 500, 300),
    ],
)
def test_attended_tokens(position: int, first: bool, reusable: int, chunk: int, prompt: int, attended: int) -> None:
    found = attended_tokens(position=position, chunk=chunk, prompt_len=prompt, reusable=reusable, first_chunk=first)
    assert found == attended


@pytest.mark.parametrize(
    ("attended", "cap", "kept"),
    [
        ([50, 50, 50], 120, 2),
        ([200, 50], 120, 1),
        ([50], 1, 1),
        ([50, 50], 0, 1),
        ([50, 50], None, 2),
        ([50, 70], 120, 2),
        ([50, 71], 120, 1),
        ([50, 71, 1], 120, 1),
        ([], 0, 0),
        ([], None, 0),
    ],
)
def test_which_requests_stay_in_the_step(attended: list[int], cap: int | None, kept: int) -> None:
    assert keep_prefix_within_cap(attended, cap) == kept


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(0, 500))
def test_the_kept_prefix_is_the_longest_within_the_cap(attended: list[int], cap: int) -> None:
    kept = keep_prefix_within_cap(attended, cap)
    assert kept >= min(len(attended), 1)
    assert kept <= 1 or sum(attended[:kept]) <= cap
    assert kept == len(attended) or sum(attended[: kept + 1]) > cap


def test_requests_that_come_back_in_pieces_attend_to_more_than_unchunked_ones() -> None:
    """Without chunks and reuse only a policy that pauses, with steps shorter than a request, needs the workspace."""
    bare = BudgetConfig(
        max_seq_len=1024, max_batch_size=4, max_num_tokens=512, enable_chunked_prefill=False, enable_block_reuse=False
    )
    assert context_workspace_for(bare, 640) is None
    for pausing in (bare.replace(kv_cache_manager="v2"), bare.replace(scheduler_policy="max_utilization")):
        assert context_workspace_for(pausing, 640) == ContextWorkspace(640, 4 * 1024)
        assert context_workspace_for(pausing.replace(max_num_tokens=1024), 640) is None
