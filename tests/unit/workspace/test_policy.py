from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.errors import ConfigError
from onebudget.workspace import WorkspaceShrinkPolicy

FLOOR, CAPACITY = 100, 400
State = tuple[int, int]


def policy(state: State = (3, 0)) -> WorkspaceShrinkPolicy:
    made = WorkspaceShrinkPolicy(FLOOR)
    made.remaining, made.window_max_bytes = state
    return made


def state_of(watched: WorkspaceShrinkPolicy) -> State:
    return watched.remaining, watched.window_max_bytes


STATES = [(3, 0), (2, 150), (1, 180)]


@pytest.mark.parametrize("floor", [-1, -100])
def test_e0_a_floor_below_zero(floor: int) -> None:
    with pytest.raises(ValueError, match="floor_bytes"):
        WorkspaceShrinkPolicy(floor)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("required", "capacity"), [(-1, 400), (401, 400), (50, 99)])
def test_e1_e2_impossible_sizes_change_nothing(state: State, required: int, capacity: int) -> None:
    watched = policy(state)
    for grew in (False, True):
        with pytest.raises(ConfigError):
            watched.finish_forward(required, capacity, grew=grew)
    assert state_of(watched) == state


@pytest.mark.parametrize(
    ("row", "state", "required", "capacity", "grew", "after", "result"),
    [
        *[("T0", state, 0, CAPACITY, False, state, None) for state in STATES],
        *[("T0 before T1", state, 0, CAPACITY, True, state, None) for state in STATES],
        *[("T0 before T2", state, 0, FLOOR, False, state, None) for state in STATES],
        *[("T1", state, 150, CAPACITY, True, (3, 0), None) for state in STATES],
        *[("T2", state, 50, FLOOR, False, (3, 0), None) for state in STATES],
        *[("T3", state, CAPACITY, CAPACITY, False, (3, 0), None) for state in STATES],
        ("T4", (3, 0), 150, CAPACITY, False, (2, 150), None),
        ("T4 keeps a maximum", (3, 200), 150, CAPACITY, False, (2, 200), None),
        ("T5", (2, 150), 120, CAPACITY, False, (1, 150), None),
        ("T5 raises it", (2, 150), 160, CAPACITY, False, (1, 160), None),
        ("T6", (1, 150), 180, CAPACITY, False, (3, 0), 180),
        ("T6 of an earlier one", (1, 190), 180, CAPACITY, False, (3, 0), 190),
        ("T6 at the floor", (1, 90), 50, CAPACITY, False, (3, 0), FLOOR),
    ],
)
def test_transition(
    row: str, state: State, required: int, capacity: int, grew: bool, after: State, result: int | None
) -> None:
    watched = policy(state)
    assert watched.finish_forward(required, capacity, grew=grew) == result, row
    assert state_of(watched) == after, row


@pytest.mark.parametrize("state", STATES)
def test_r_reset(state: State) -> None:
    watched = policy(state)
    watched.reset()
    assert state_of(watched) == (3, 0)


def test_the_window_is_a_setting() -> None:
    watched = WorkspaceShrinkPolicy(0, window=1)
    assert watched.finish_forward(5, 9, grew=False) == 5
    watched = WorkspaceShrinkPolicy(0, window=4)
    assert [watched.finish_forward(5, 9, grew=False) for _ in range(4)] == [None, None, None, 5]
    with pytest.raises(ConfigError, match="window"):
        WorkspaceShrinkPolicy(0, window=0)


@given(st.integers(0, 300), st.integers(0, 300), st.lists(st.integers(0, 500), max_size=40))
def test_results_lie_between_floor_and_capacity_and_take_three_forwards(
    floor: int, more: int, demands: list[int]
) -> None:
    watched, capacity = WorkspaceShrinkPolicy(floor), floor + more
    counted: list[int] = []
    for demand in demands:
        grew, capacity = demand > capacity, max(capacity, demand)
        target = watched.finish_forward(demand, capacity, grew=grew)
        if demand:
            counted = [] if grew or capacity in (floor, demand) else [*counted, demand]
        if target is None:
            assert len(counted) < 3
            continue
        assert len(counted) == 3 and target == max(floor, *counted)
        assert floor <= target < capacity
        counted, capacity = [], target
