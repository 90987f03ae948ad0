"""Between admission and the step a promised prefix may shrink: what was promised too much is computed a step later."""

from __future__ import annotations

import logging

import pytest

from onebudget.core import Request, RequestState
from onebudget.devtools.scheduled import cache_of, carry_out, config_of, ids, request_of, scheduler_of
from onebudget.scheduling import Scheduler, fit_token_budget


def fit(queue: Scheduler, batch: object, max_num_tokens: int) -> int:
    return fit_token_budget(batch, max_num_tokens, 32).trimmed  # type: ignore[arg-type]


def generating(queue: Scheduler, count: int) -> list[Request]:
    members = [request_of(100 + number, 1, 50) for number in range(count)]
    for one in members:
        queue.add(one)
    carry_out(queue, queue.schedule())
    assert all(one.state is RequestState.GENERATION for one in members)
    return members


def test_less_reuse_than_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 generate; X is charged 128 of 512 tokens, because 384 seem to be kept; Y is charged 96. 288 are kept."""
    queue = scheduler_of(200, max_num_tokens=256, max_batch_size=64)
    generating(queue, 32)
    cache = cache_of(queue)
    first, second = request_of(0, 512, 4), request_of(1, 1000, 4)
    promised, found = {0: 384, 1: 0}, {0: 288, 1: 0}
    monkeypatch.setattr(cache, "reusable_tokens", lambda one: promised[one.id])
    original = cache.begin_all

    def begin_all(requests: list[Request]) -> list[int]:
        original(requests)
        return [found[one.id] for one in requests]

    monkeypatch.setattr(cache, "begin_all", begin_all)
    queue.add(first)
    queue.add(second)
    batch = queue.schedule()
    assert (first.reusable_estimate, first.chunk_tokens, second.chunk_tokens, batch.tokens) == (384, 128, 96, 256)
    queue.begin(batch)
    assert (first.computed_tokens, first.chunk_tokens, batch.tokens) == (288, 224, 352)
    assert fit(queue, batch, 256) == 96
    assert (first.chunk_tokens, batch.tokens) == (128, 256)
    assert ids(batch.context_chunking) == [1, 0] and batch.context_last == []
    first.computed_tokens += first.chunk_tokens
    assert first.remaining_prompt_tokens == 96


def test_more_reuse_than_was_promised_makes_a_chunk_the_last() -> None:
    queue = scheduler_of(200, max_num_tokens=64)
    queue.add(one := request_of(0, 96, 4))
    batch = queue.schedule()
    assert (ids(batch.context_chunking), one.chunk_tokens) == ([0], 64)
    cache = cache_of(queue)
    original = cache.begin_all
    cache.begin_all = lambda requests: [64 for _ in original(requests)]  # type: ignore[method-assign]
    queue.begin(batch)
    assert (ids(batch.context_last), one.computed_tokens, one.chunk_tokens) == ([0], 64, 32)


def test_the_v2_cache_knows_one_policy(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(scheduler_of(4))
    with caplog.at_level(logging.WARNING):
        Scheduler(config_of(kv_cache_manager="v2"), cache)
        assert not caplog.text
        Scheduler(config_of(kv_cache_manager="v2", scheduler_policy="static_batch"), cache)
    assert "max_utilization" in caplog.text and "static_batch" in caplog.text
