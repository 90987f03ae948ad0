from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, SamplingParams, ScheduledBatch
from onebudget.errors import CapacityError, NoFreeSlotsError
from onebudget.resources import SequenceSlotManager


def requests(count: int) -> list[Request]:
    return [Request(number, [1], SamplingParams(), max_new_tokens=1, chunk_tokens=1) for number in range(count)]


def batch(*members: Request) -> ScheduledBatch:
    return ScheduledBatch(context_last=list(members))


def test_slots_are_given_once_and_all_of_them() -> None:
    manager, members = SequenceSlotManager(3), requests(3)
    manager.prepare(batch(*members))
    assert sorted(map(manager.slot_of, members)) == [0, 1, 2]
    given_before = list(map(manager.slot_of, members))
    manager.prepare(batch(*members))
    assert list(map(manager.slot_of, members)) == given_before
    assert manager.free_slots == 0
    assert (manager.max_resource_count(), manager.needed_to_completion(members[0])) == (3, 1)


def test_one_more_than_there_are_names_the_request() -> None:
    manager, members = SequenceSlotManager(2), requests(3)
    with pytest.raises(NoFreeSlotsError) as none_left:
        manager.prepare(batch(*members))
    assert isinstance(none_left.value, CapacityError)
    assert (none_left.value.request_id, none_left.value.needed, none_left.value.free) == (2, 1, 0)


def test_free_twice_and_unknown_is_free_once() -> None:
    manager, members = SequenceSlotManager(2), requests(2)
    manager.prepare(batch(members[0]))
    for _ in range(2):
        manager.free(members[0])
    manager.free(members[1])
    assert manager.free_slots == 2
    with pytest.raises(KeyError):
        manager.slot_of(members[0])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_any_order_of_taking_and_freeing(moves: list[tuple[bool, int]]) -> None:
    manager, members, running = SequenceSlotManager(4), requests(8), set()
    for take, number in moves:
        if not take:
            manager.free(members[number])
            running.discard(number)
        elif number in running or len(running) < 4:
            manager.prepare(batch(members[number]))
            running.add(number)
        else:
            with pytest.raises(NoFreeSlotsError):
                manager.prepare(batch(members[number]))
        assert len({manager.slot_of(members[held]) for held in running}) == len(running)
        assert manager.free_slots == 4 - len(running)
