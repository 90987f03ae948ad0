"""Admission with three requests in order: 64 + 64 tokens (4 blocks to completion), 320 + 160 (15), 32 + 32 (2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import RequestState
from onebudget.devtools.scheduled import BLOCK, cache_of, carry_out, drain, ids, request_of, scheduler_of
from onebudget.errors import ConfigError
from onebudget.scheduling import Scheduler
from onebudget.scheduling.capacity import make_policy, scheduler_capacity

LENGTHS = [(64, 64), (320, 160), (32, 32)]


def three(blocks: int, policy: str, **knobs: object) -> Scheduler:
    queue = scheduler_of(blocks, scheduler_policy=policy, **knobs)
    for number, (prompt, new) in enumerate(LENGTHS):
        queue.add(request_of(number, prompt, new))
    return queue


@pytest.mark.parametrize(
    ("blocks", "policy", "first", "second", "paused"),
    [
        (20, "guaranteed_no_evict", [0, 1], [0, 1], []),
        (20, "max_utilization", [0, 1, 2], [0, 1, 2], []),
        (15, "max_utilization", [0, 1, 2], [0, 1], [2]),
        (15, "guaranteed_no_evict", [0], [0], []),
        (20, "static_batch", [0, 1], [0, 1], []),
    ],
)
def test_who_starts_and_who_goes_on(
    blocks: int, policy: str, first: list[int], second: list[int], paused: list[int]
) -> None:
    queue = three(blocks, policy)
    batch = queue.schedule()
    assert ids(batch.context_last) == first
    carry_out(queue, batch)
    batch = queue.schedule()
    assert ids(batch.generation) == second
    assert ids(batch.paused) == paused
    assert queue.paused == len(paused)
    carry_out(queue, batch)


def test_max_utilization_uses_the_blocks_of_the_table() -> None:
    queue = three(15, "max_utilization")
    carry_out(queue, queue.schedule())
    assert cache_of(queue).used_blocks == 13
    carry_out(queue, queue.schedule())
    assert cache_of(queue).used_blocks == 14


def test_the_paused_one_comes_back_first_and_computes_prompt_and_answer_again() -> None:
    queue = three(15, "max_utilization")
    carry_out(queue, queue.schedule())
    carry_out(queue, queue.schedule())
    third = queue.waiting[0]
    assert (third.id, third.state, third.computed_tokens, third.replayed_tokens) == (2, RequestState.WAITING, 0, 1)
    assert third.context_tokens == 33
    drain(queue)
    assert len(third.output_token_ids) == 32
    assert third.pauses >= 1
    assert cache_of(queue).free_blocks == 15


def test_a_static_batch_ends_before_the_next_begins() -> None:
    queue = three(20, "static_batch")
    seen = []
    while queue.has_work:
        batch = queue.schedule()
        seen.append(frozenset(ids(batch.requests)))
        carry_out(queue, batch)
    assert list(dict.fromkeys(seen)) == [frozenset({0, 1}), frozenset({1}), frozenset({2})]


def test_two_steps_must_fit_where_the_next_is_launched_before() -> None:
    """31 + 1 tokens fill a block; the step after that needs another, which exists only in the larger pool."""
    for blocks, paused in ((3, 1), (4, 0)):
        queue = scheduler_of(blocks, scheduler_policy="max_utilization", options={"pp_size": 2})
        queue.add(request_of(0, 31, 3))
        queue.add(request_of(1, 31, 3))
        carry_out(queue, queue.schedule())
        assert queue.paused == 0
        carry_out(queue, queue.schedule())
        assert queue.paused == paused
    queue = scheduler_of(3, scheduler_policy="max_utilization")
    queue.add(request_of(0, 31, 3))
    queue.add(request_of(1, 31, 3))
    carry_out(queue, queue.schedule())
    carry_out(queue, queue.schedule())
    assert queue.paused == 0


@pytest.mark.parametrize(
    ("places", "options", "capacity"),
    [
        (8, {}, 8), (8, {"pp_size": 4}, 32), (8, {"pp_size": 4, "is_v2": True}, 8), (1, {"attention_dp": True}, 2),
        (1, {"attention_dp": True, "has_kv": False}, 1), (1, {}, 1), (2, {"attention_dp": True}, 2),
        (1, {"attention_dp": True, "pp_size": 2}, 2),
    ],
)  # fmt: skip
def test_places(places: int, options: dict[str, object], capacity: int) -> None:
    assert scheduler_capacity(places, **options) == capacity  # type: ignore[arg-type]


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="scheduler_policy"):
        make_policy("largest_first", cache_of(scheduler_of(1)))


loads = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=10)


@given(
    loads,
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    st.integers(5, 20),
    st.integers(1, 80),
    st.booleans(),
)
def test_everybody_completes_and_blocks_are_never_short(
    load: list[tuple[int, int, int]], policy: str, blocks: int, tokens: int, reuse: bool
) -> None:
    queue = scheduler_of(
        blocks, scheduler_policy=policy, max_num_tokens=tokens, max_batch_size=4, enable_block_reuse=reuse
    )
    members = [request_of(number, prompt, new, first=family) for number, (prompt, new, family) in enumerate(load)]
    for one in members:
        queue.add(one)
    oldest, steps = members[0], 0
    while queue.has_work:
        before = queue.paused
        carry_out(queue, queue.schedule())
        steps += 1
        assert steps < 5000
        assert policy == "max_utilization" or queue.paused == before == 0
        if oldest.finished and steps and oldest is members[0]:
            assert oldest.pauses == 0  # the first in line is the last to be paused
    assert all(len(one.output_token_ids) == one.max_new_tokens for one in members)
    kv = cache_of(queue)
    kv.reset_reuse()
    assert kv.free_blocks == blocks
    assert kv.tokens_per_block == BLOCK


@given(loads, st.integers(5, 12))
def test_the_first_in_line_ends_in_bounded_steps(load: list[tuple[int, int, int]], blocks: int) -> None:
    queue = scheduler_of(blocks, scheduler_policy="max_utilization", max_num_tokens=64, max_batch_size=8)
    for number, (prompt, new, _) in enumerate(load):
        queue.add(request_of(number, prompt, new))
    first = queue.waiting[0]
    bound = -(-first.prompt_tokens // BLOCK) + first.max_new_tokens
    for _ in range(bound):
        if not first.finished:
            carry_out(queue, queue.schedule())
    assert first.finished
