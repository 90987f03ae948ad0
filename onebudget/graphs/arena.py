"""Where recorded tensors lie: offsets by liveness, so that a graph keeps the peak of its step and not the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebudget.units import align_up

ALIGNMENT_BYTES = 512  # the smallest unit of torch's caching allocator, so that plans and books agree


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that must exist from operation ``first`` to operation ``last``, both included."""

    nbytes: int
    first: int
    last: int


def peak_bytes(intervals: Sequence[Interval]) -> int:
    """The most bytes that are alive at once: no layout is smaller."""
    changes: dict[int, int] = {}
    for one in intervals:
        size = align_up(one.nbytes, ALIGNMENT_BYTES)
        changes[one.first] = changes.get(one.first, 0) + size
        changes[one.last + 1] = changes.get(one.last + 1, 0) - size
    alive = highest = 0
    for moment in sorted(changes):
        alive += changes[moment]
        highest = max(highest, alive)
    return highest


def place(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """An offset per interval, none overlapping another that is alive at the same time, and the bytes they span.

    Largest first, each into the smallest gap among its contemporaries that holds it: within a few per cent of
    ``peak_bytes`` for the nested lifetimes of a forward.
    """
    offsets = [0] * len(intervals)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(intervals)), key=lambda i: (-intervals[i].nbytes, intervals[i].first)):
        one = intervals[index]
        taken = sorted(
            (offsets[other], offsets[other] + align_up(intervals[other].nbytes, ALIGNMENT_BYTES))
            for other in placed
            if intervals[other].first <= one.last and one.first <= intervals[other].last
        )
        size = align_up(one.nbytes, ALIGNMENT_BYTES)
        offsets[index] = _smallest_gap(taken, size)
        placed.append(index)
        total = max(total, offsets[index] + size)
    return offsets, total


def _smallest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    best: tuple[int, int] | None = None
    end = 0
    for start, stop in taken:
        gap = start - end
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, end)
        end = max(end, stop)
    return end if best is None else best[1]
