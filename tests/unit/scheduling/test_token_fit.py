from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.scheduling.token_fit import FitResult, batch_tokens, fit_token_budget, trimmed_chunk

BLOCK = 32


def context(number: int, position: int, chunk: int, prompt: int, drafts: int = 0) -> Request:
    request = Request(number, [1] * prompt, SamplingParams(), max_new_tokens=4, state=RequestState.CONTEXT)
    request.computed_tokens, request.chunk_tokens, request.begun = position, chunk, True
    request.draft_tokens = [0] * drafts
    return request


def generating(number: int, drafts: int = 0) -> Request:
    request = Request(number, [1], SamplingParams(), max_new_tokens=4, state=RequestState.GENERATION)
    request.draft_tokens = [0] * drafts
    return request


def batch_of(*requests: Request) -> ScheduledBatch:
    batch = ScheduledBatch()
    for request in requests:
        batch.add(request)
    return batch


@pytest.mark.parametrize(
    ("position", "chunk", "need", "left"),
    [(64, 100, 10, 64), (40, 100, 30, 56), (0, 20, 5, 20), (64, 100, 1000, 32)],
)
def test_a_trimmed_chunk_ends_on_a_block_and_finishes_one(position: int, chunk: int, need: int, left: int) -> None:
    assert trimmed_chunk(position, chunk, need, BLOCK) == left


def test_generation_keeps_its_tokens_and_a_chunk_gives_way() -> None:
    """8 requests with 4 tokens each, chunks of 128 and 160: 320 tokens for 256."""
    longer = context(8, 0, 160, 160)
    batch = batch_of(*(generating(number, drafts=3) for number in range(8)), context(9, 0, 128, 500), longer)
    assert batch_tokens(batch) == 320
    assert fit_token_budget(batch, 256, BLOCK) == FitResult(trimmed=64)
    assert (longer.chunk_tokens, batch_tokens(batch)) == (96, 256)
    assert batch.context_last == [] and longer in batch.context_chunking


def test_less_reuse_than_promised_is_computed_a_step_later() -> None:
    """X was charged 128 of 512 tokens, because 384 seemed to be kept; 288 were."""
    first = context(0, 288, 224, 512)
    second = context(1, 0, 96, 1000)
    batch = batch_of(*(generating(2 + number) for number in range(32)), second, first)
    assert batch_tokens(batch) == 352
    assert fit_token_budget(batch, 256, BLOCK) == FitResult(trimmed=96)
    assert (first.chunk_tokens, batch_tokens(batch)) == (128, 256)
    assert batch.context_chunking == [second, first]
    first.computed_tokens += first.chunk_tokens
    assert first.remaining_prompt_tokens == 96


def test_a_batch_that_fits_is_left_alone() -> None:
    batch = batch_of(context(0, 0, 56, 56), *(generating(1 + number) for number in range(8)))
    assert fit_token_budget(batch, 64, BLOCK) == FitResult()
    assert fit_token_budget(batch, 63, BLOCK) == FitResult(trimmed=24)


def test_generation_alone_is_never_touched() -> None:
    assert fit_token_budget(batch_of(*(generating(number) for number in range(4))), 2, BLOCK) == FitResult()


def test_without_chunks_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    batch = batch_of(context(0, 0, 100, 100))
    with caplog.at_level(logging.WARNING):
        assert fit_token_budget(batch, 64, BLOCK, chunked=False) == FitResult(excess=36)
    assert batch.context_last[0].chunk_tokens == 100
    assert "100 tokens" in caplog.text and "64" in caplog.text and "chunked prefill is off" in caplog.text


def test_media_that_attend_both_ways_stay_whole() -> None:
    pictured, plain = context(0, 0, 64, 64), context(1, 0, 64, 64)
    pictured.media_digests = ((3, "digest"),)
    batch = batch_of(plain, pictured)
    fit_token_budget(batch, 96, BLOCK)
    assert (plain.chunk_tokens, pictured.chunk_tokens) == (32, 64)


pieces_of_contexts = st.tuples(st.integers(0, 200), st.integers(1, 300), st.integers(0, 200), st.integers(0, 3))


@given(st.lists(pieces_of_contexts, max_size=6), st.integers(0, 12), st.integers(1, 400), st.sampled_from([1, 8, 32]))
def test_membership_blocks_and_tokens(
    pieces: list[tuple[int, int, int, int]], generation: int, max_tokens: int, size: int
) -> None:
    members = [
        context(number, position, chunk, position + chunk + behind, drafts)
        for number, (position, chunk, behind, drafts) in enumerate(pieces)
    ]
    before = {one.id: one.chunk_tokens for one in members}
    batch = batch_of(*members, *(generating(100 + number) for number in range(generation)))
    membership = {one.id for one in batch.requests}
    total = batch_tokens(batch)
    result = fit_token_budget(batch, max_tokens, size)
    assert {one.id for one in batch.requests} == membership
    assert batch_tokens(batch) == total - result.trimmed
    assert batch_tokens(batch) <= max_tokens or result.excess or not members
    for one in members:
        assert 1 <= one.chunk_tokens <= before[one.id]
        if one.chunk_tokens < before[one.id]:
            assert (one.computed_tokens + one.chunk_tokens) % size == 0
            assert one.chunk_tokens >= size - one.computed_tokens % size
    assert all(one.is_last_chunk for one in batch.context_last)
    assert not any(one.is_last_chunk for one in batch.context_chunking)
