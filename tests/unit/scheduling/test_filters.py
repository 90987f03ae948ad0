from __future__ import annotations

import pytest

from onebudget.devtools.scheduled import cache_of, carry_out, drain, ids, request_of, scheduler_of
from onebudget.scheduling.filters import BatchWait, ContextBalance, RecurrentCapacity, StepLoad
from onebudget.scheduling.pieces import Piece


def pieces(*tokens: int) -> list[Piece]:
    return [Piece(request_of(number, 100, 1), 0, count) for number, count in enumerate(tokens)]


BUSY = StepLoad(generation=4, generation_tokens=4)


def test_contexts_wait_for_a_fuller_step_but_not_for_ever() -> None:
    hold = BatchWait(2, 0.5, 100)
    small = pieces(20)
    assert [hold(small, BUSY) for _ in range(4)] == [[], [], small, []]


@pytest.mark.parametrize(("tokens", "runs"), [(45, False), (46, True)])
def test_enough_tokens_run_at_once(tokens: int, runs: bool) -> None:
    wanted = pieces(tokens)
    assert BatchWait(5, 0.5, 100)(wanted, BUSY) == (wanted if runs else [])


def test_with_nothing_to_generate_nobody_waits() -> None:
    wanted = pieces(1)
    assert BatchWait(5, 1.0, 100)(wanted, StepLoad(0, 0)) == wanted


def test_the_knob_holds_prompts_back_beside_generation() -> None:
    queue = scheduler_of(100, batch_wait="3:0.5", max_num_tokens=64)
    queue.add(request_of(0, 8, 10))
    carry_out(queue, queue.schedule())
    queue.add(request_of(1, 8, 10))
    seen = []
    for _ in range(5):
        batch = queue.schedule()
        seen.append(ids(batch.context))
        carry_out(queue, batch)
    assert seen == [[], [], [], [1], []]


def test_first_chunks_need_a_state_and_later_ones_have_theirs() -> None:
    wanted = pieces(10, 10, 10)
    wanted[1].request.begun = True
    assert RecurrentCapacity(lambda: 1)(wanted, BUSY) == wanted[:2]
    assert RecurrentCapacity(lambda: 0)(wanted, BUSY) == []


def test_states_limit_who_starts() -> None:
    queue = scheduler_of(100, options={"free_states": lambda: 2})
    for number in range(3):
        queue.add(request_of(number, 8, 4))
    assert ids(queue.schedule().context) == [0, 1]


def test_contexts_wait_until_enough_ranks_have_some() -> None:
    others = [[1, 0, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    balance = ContextBalance(lambda mine: others.pop(0), iterations=2, share=0.75)
    wanted = pieces(8)
    assert balance(wanted, BUSY) == []
    assert balance(wanted, BUSY) == wanted
    assert [balance(wanted, BUSY) for _ in range(3)] == [[], [], wanted]


def test_a_rank_with_nothing_else_to_do_is_not_kept_waiting() -> None:
    balance = ContextBalance(lambda mine: [1, 2, 0, 0], iterations=5)
    wanted = pieces(8)
    assert balance(wanted, BUSY) == wanted


def test_those_taken_out_keep_their_state() -> None:
    queue = scheduler_of(100, batch_wait="9:1", max_num_tokens=64)
    queue.add(request_of(0, 8, 3))
    carry_out(queue, queue.schedule())
    queue.add(late := request_of(1, 8, 3))
    queue.schedule()
    assert (late.computed_tokens, late.chunk_tokens, late.begun, list(queue.waiting)) == (0, 0, False, [late])
    assert cache_of(queue).used_blocks == 1
    assert len(drain(queue)) == 2
