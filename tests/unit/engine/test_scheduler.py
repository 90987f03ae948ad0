from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.devtools.scripted import scripted_executor
from onebudget.resources.kv.manager import blocks_to_completion
from onebudget.scheduling import Scheduler

BLOCK = 32


def scheduler(blocks: int, **knobs: Any) -> Scheduler:
    config = BudgetConfig(**{"max_seq_len": 1024, "max_num_tokens": 4096, "tokens_per_block": BLOCK, **knobs})
    return scripted_executor(config, blocks).scheduler


def request(number: int, prompt: int, new: int) -> Request:
    # Every prompt starts differently, so that nothing is reused.
    return Request(number, [1000 + number] * prompt, SamplingParams(), max_new_tokens=new)


def ids(batch: ScheduledBatch) -> list[int]:
    return [one.id for one in batch.requests]


def computed(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """Do what a step does to the requests of a batch; those with all their tokens leave."""
    scheduler.begin(batch)
    for one in batch.requests:
        if one.state is RequestState.GENERATION:
            one.computed_tokens += 1
        else:
            one.computed_tokens += one.chunk_tokens
        if one.computed_tokens >= one.prompt_tokens:
            one.state = RequestState.GENERATION
            one.output_token_ids.append(5)
        if len(one.output_token_ids) >= one.max_new_tokens:
            one.finish("length")
            scheduler.remove(one)


# A 64+64 is 4 blocks to completion, B 320+160 is 15, C 32+32 is 2.
def test_a_request_starts_only_when_its_completion_fits_beside_all_others() -> None:
    queue = scheduler(20)
    for number, (prompt, new) in enumerate([(64, 64), (320, 160), (32, 32)]):
        queue.add(request(number, prompt, new))
    assert ids(queue.schedule()) == [0, 1]


def test_the_first_that_does_not_fit_stops_the_list() -> None:
    queue = scheduler(15)
    for number, (prompt, new) in enumerate([(64, 64), (320, 160), (32, 32)]):
        queue.add(request(number, prompt, new))
    assert ids(queue.schedule()) == [0]


@pytest.mark.parametrize(("blocks", "started"), [(8, [0, 1]), (7, [0])])
def test_the_pool_is_filled_exactly_and_one_block_more_waits(blocks: int, started: list[int]) -> None:
    queue = scheduler(blocks)
    queue.add(request(0, 64, 64))
    queue.add(request(1, 100, 28))
    assert ids(queue.schedule()) == started


def test_blocks_reserved_for_completion_come_back_when_a_request_leaves() -> None:
    queue = scheduler(4)
    queue.add(first := request(0, 64, 64))
    queue.add(request(1, 64, 64))
    batch = queue.schedule()
    assert ids(batch) == [0]
    queue.remove(first)
    assert ids(queue.schedule()) == [1]
    queue.remove(first)
    queue.remove(request(2, 1, 1))
    assert [one.id for one in queue.running] == [1]


def test_a_waiting_request_can_leave() -> None:
    queue = scheduler(4)
    queue.add(one := request(0, 64, 64))
    assert queue.has_work
    queue.remove(one)
    assert not queue.has_work
    assert queue.schedule().size == 0


def test_generation_first_and_prompts_take_what_is_left() -> None:
    queue = scheduler(100, max_num_tokens=80)
    queue.add(request(0, 30, 8))
    queue.add(request(1, 60, 8))
    batch = queue.schedule()
    assert [(one.id, one.chunk_tokens) for one in batch.context_last] == [(0, 30)]
    assert [(one.id, one.chunk_tokens) for one in batch.context_chunking] == [(1, 32)]  # whole blocks of the 50 left
    computed(queue, batch)
    queue.add(request(2, 70, 8))
    batch = queue.schedule()
    assert [one.id for one in batch.generation] == [0]
    assert [(one.id, one.chunk_tokens) for one in batch.context_last] == [(1, 28)]
    assert [(one.id, one.chunk_tokens) for one in batch.context_chunking] == [(2, 32)]
    assert batch.tokens == 61


def test_a_step_smaller_than_a_block_still_moves_its_first_prompt() -> None:
    queue = scheduler(100, max_num_tokens=20)
    queue.add(request(0, 50, 8))
    queue.add(request(1, 50, 8))
    batch = queue.schedule()
    assert [(one.id, one.chunk_tokens) for one in batch.context] == [(0, 20)]
    computed(queue, batch)
    # The rest of the block that it began in ends on a boundary; the eight tokens left are no block for anybody.
    assert [(one.id, one.chunk_tokens) for one in queue.schedule().context] == [(0, 12)]


def test_without_chunks_a_prompt_waits_for_a_step_with_room() -> None:
    queue = scheduler(100, max_num_tokens=40, enable_chunked_prefill=False)
    for number in range(3):
        queue.add(request(number, 30, 2))
    seen = []
    while queue.has_work:
        batch = queue.schedule()
        assert not batch.context_chunking
        seen.append(ids(batch))
        computed(queue, batch)
    assert seen == [[0], [1, 0], [2, 1], [2]]


def test_no_more_requests_than_seats() -> None:
    queue = scheduler(100, max_batch_size=2)
    for number in range(3):
        queue.add(request(number, 4, 2))
    assert ids(queue.schedule()) == [0, 1]


workloads = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=14)


@given(
    workloads,
    st.integers(1, 128),
    st.integers(1, 5),
    st.integers(11, 40),
    st.booleans(),
    st.sampled_from([1, 7, 32, 64]),
)
def test_any_workload(
    load: list[tuple[int, int, int]], max_tokens: int, seats: int, blocks: int, chunked: bool, size: int
) -> None:
    """Nobody is overtaken or paused, no limit is exceeded, and whoever can run ends."""
    queue = scheduler(
        blocks, max_num_tokens=max_tokens, max_batch_size=seats, enable_chunked_prefill=chunked, tokens_per_block=size
    )
    members = [
        (request(number, prompt, new), arrival)
        for number, (prompt, new, arrival) in enumerate(load)
        if blocks_to_completion(prompt, new, size) <= blocks and (chunked or prompt <= max_tokens)
    ]
    members.sort(key=lambda member: member[1])
    expected = [one.id for one, _ in members]
    started: list[int] = []
    for number in range(20_000):
        while members and members[0][1] <= number:
            queue.add(members.pop(0)[0])
        if not queue.has_work and not members:
            break
        running_before = [one for one in queue.running if one.state is RequestState.GENERATION]
        batch = queue.schedule()
        assert batch.tokens <= max_tokens
        assert batch.size <= len(queue.running) <= seats
        assert batch.generation == running_before
        assert sum(blocks_to_completion(one.prompt_tokens, one.max_new_tokens, size) for one in queue.running) <= blocks
        assert all(1 <= one.chunk_tokens <= one.remaining_prompt_tokens for one in batch.context)
        assert chunked or not batch.context_chunking
        assert batch.size > 0 or not queue.has_work
        started += [one.id for one in queue.running if one.id not in started]
        computed(queue, batch)
    assert started == expected
    assert not queue.has_work
