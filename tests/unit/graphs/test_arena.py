"""Offsets by liveness: nothing alive at the same time overlaps, and the arena is close to what must be alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onebudget.graphs.arena import ALIGNMENT_BYTES, Interval, peak_bytes, place

UNIT = ALIGNMENT_BYTES


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Interval]:
    count = draw(st.integers(0, 25))
    spans = [sorted(draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))) for _ in range(count)]
    return [Interval(draw(st.integers(0, 9 * UNIT)), first, last) for first, last in spans]


@given(lifetimes())
def test_contemporaries_never_overlap(intervals: list[Interval]) -> None:
    offsets, total = place(intervals)
    assert total >= peak_bytes(intervals)
    for index, one in enumerate(intervals):
        assert offsets[index] % UNIT == 0
        assert offsets[index] + one.nbytes <= total
        for other in range(index):
            if intervals[other].first <= one.last and one.first <= intervals[other].last:
                low, high = sorted((index, other), key=lambda i: (offsets[i], intervals[i].nbytes))
                assert offsets[low] + intervals[low].nbytes <= offsets[high] or not intervals[low].nbytes


def test_a_chain_of_equal_tensors_takes_two() -> None:
    """Each is read by the operation that makes the next, as in a forward: fifty of them need the room of two."""
    chain = [Interval(3 * UNIT, moment, moment + 1) for moment in range(50)]
    assert place(chain)[1] == peak_bytes(chain) == 6 * UNIT


def test_what_is_never_alive_together_shares_a_place() -> None:
    intervals = [Interval(8 * UNIT, 0, 1), Interval(4 * UNIT, 2, 3), Interval(4 * UNIT, 2, 3)]
    assert place(intervals) == ([0, 0, 4 * UNIT], 8 * UNIT)


def test_sizes_are_rounded_to_the_allocator_s_unit() -> None:
    assert place([Interval(1, 0, 0), Interval(UNIT + 1, 0, 0)])[1] == 3 * UNIT


def test_nothing_takes_nothing() -> None:
    assert place([]) == ([], 0)
    assert peak_bytes([]) == 0
