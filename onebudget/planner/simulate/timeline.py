"""What happened over virtual time, in a bounded number of points however long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 512


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """A stretch of virtual time that ends at ``until_s``: means weighted by time, and the highest use of blocks."""

    until_s: float
    used_blocks: float
    peak_used_blocks: int
    batch: float
    waiting: float

    def to_dict(self) -> dict[str, float]:
        return {
            "until_s": round(self.until_s, 6),
            "used_blocks": round(self.used_blocks, 3),
            "peak_used_blocks": self.peak_used_blocks,
            "batch": round(self.batch, 3),
            "waiting": round(self.waiting, 3),
        }


class Timeline:
    """Stretches of equal length in steps; when there are too many, each two become one."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most = most_points
        self._points: list[TimelinePoint] = []
        self._steps_per_point = 1
        self._steps = 0
        self._start_s = 0.0
        self._sums = [0.0, 0.0, 0.0]
        self._peak = 0

    def record(self, start_s: float, end_s: float, used_blocks: int, batch: int, waiting: int) -> None:
        """One step, or a pause with nothing to do. Stretches follow each other without gaps."""
        seconds, sums = end_s - start_s, self._sums
        sums[0] += seconds * used_blocks
        sums[1] += seconds * batch
        sums[2] += seconds * waiting
        if used_blocks > self._peak:
            self._peak = used_blocks
        self._steps += 1
        if self._steps == self._steps_per_point:
            self._close(end_s)

    def _close(self, end_s: float) -> None:
        seconds = end_s - self._start_s
        means = [value / seconds if seconds else 0.0 for value in self._sums]
        self._points.append(TimelinePoint(end_s, means[0], self._peak, means[1], means[2]))
        self._start_s, self._sums, self._steps, self._peak = end_s, [0.0, 0.0, 0.0], 0, 0
        if len(self._points) >= 2 * self._most:
            self._points = _halved(self._points)
            self._steps_per_point *= 2

    def points(self, end_s: float) -> tuple[TimelinePoint, ...]:
        """All stretches, the unfinished one cut at ``end_s``."""
        if self._steps:
            self._close(end_s)
        return tuple(_halved(self._points) if len(self._points) > self._most else self._points)


def _halved(points: Sequence[TimelinePoint]) -> list[TimelinePoint]:
    halved, before = [], 0.0
    for at in range(0, len(points), 2):
        pair = points[at : at + 2]
        halved.append(_merged(before, pair))
        before = pair[-1].until_s
    return halved


def _merged(start_s: float, pair: Sequence[TimelinePoint]) -> TimelinePoint:
    seconds = pair[-1].until_s - start_s
    starts = [start_s, *(point.until_s for point in pair)]
    weights = [
        (point.until_s - before) / seconds if seconds else 0.0 for before, point in zip(starts, pair, strict=False)
    ]

    def mean(name: str) -> float:
        return float(sum(weight * getattr(point, name) for weight, point in zip(weights, pair, strict=True)))

    peak = max(point.peak_used_blocks for point in pair)
    return TimelinePoint(pair[-1].until_s, mean("used_blocks"), peak, mean("batch"), mean("waiting"))
