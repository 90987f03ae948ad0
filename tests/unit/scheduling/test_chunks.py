from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.devtools.scheduled import carry_out, drain, request_of, scheduler_of
from onebudget.errors import ConfigError
from onebudget.scheduling.chunks import chunk_unit, equal_chunks, next_chunk


def test_sliding_windows_need_larger_units() -> None:
    assert chunk_unit(32, sliding_windows=False) == 32
    assert chunk_unit(32, sliding_windows=True) == 256
    assert chunk_unit(512, sliding_windows=True) == 512


@pytest.mark.parametrize(
    ("position", "context", "left", "first", "tokens"),
    [
        (0, 100, 100, True, 100), (0, 100, 99, True, 96), (96, 100, 4, False, 4), (10, 100, 50, True, 22),
        (0, 100, 31, True, 31), (0, 100, 31, False, 0), (40, 100, 20, True, 20), (40, 100, 24, False, 24),
        (0, 100, 0, True, 0), (100, 100, 5, True, 1),
    ],
)  # fmt: skip
def test_a_chunk_ends_the_context_or_on_a_unit(
    position: int, context: int, left: int, first: bool, tokens: int
) -> None:
    assert next_chunk(position, context, left, unit=32, chunked=True, is_first=first) == tokens


def test_without_chunks_all_or_nothing() -> None:
    assert next_chunk(0, 100, 99, unit=32, chunked=False, is_first=True) == 0
    assert next_chunk(0, 100, 100, unit=32, chunked=False, is_first=True) == 100


@pytest.mark.parametrize(
    ("remaining", "left", "chunks"),
    [
        ([100, 100, 100], 96, [32, 32, 32]), ([100, 10, 100], 106, [64, 10, 32]), ([100], 70, [64]),
        ([20, 20], 100, [20, 20]), ([100, 100], 20, [20, 0]), ([], 50, []),
    ],
)  # fmt: skip
def test_equal_progress(remaining: list[int], left: int, chunks: list[int]) -> None:
    assert equal_chunks(remaining, left, 32) == chunks


@given(st.lists(st.integers(1, 300), max_size=6), st.integers(0, 500), st.sampled_from([1, 16, 32]))
def test_equal_progress_keeps_to_its_tokens(remaining: list[int], left: int, unit: int) -> None:
    chunks = equal_chunks(remaining, left, unit)
    assert sum(chunks) <= left
    assert all(0 <= chunk <= wanted for chunk, wanted in zip(chunks, remaining, strict=True))
    assert not remaining or not left or sum(chunks) > 0
    unfinished = [chunk for chunk, wanted in zip(chunks, remaining, strict=True) if chunk < wanted]
    assert not unfinished or max(unfinished) - min(unfinished) <= unit


def test_prompts_share_a_step_equally() -> None:
    queue = scheduler_of(100, max_num_tokens=128, options={"chunk_policy": "equal_progress"})
    for number, prompt in enumerate((120, 40, 100)):
        queue.add(request_of(number, prompt, 2))
    seen = []
    while len(seen) < 3:
        batch = queue.schedule()
        assert batch.tokens <= 128
        seen.append({one.id: one.chunk_tokens for one in batch.context})
        carry_out(queue, batch)
    assert seen == [{0: 64, 1: 32, 2: 32}, {0: 56, 1: 8, 2: 64}, {2: 4}]
    drain(queue)


def test_equal_progress_needs_blocks_that_are_certain() -> None:
    with pytest.raises(ConfigError, match="chunk_policy"):
        scheduler_of(9, scheduler_policy="max_utilization", options={"chunk_policy": "equal_progress"})
