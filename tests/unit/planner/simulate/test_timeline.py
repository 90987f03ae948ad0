from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.planner.simulate.result import Spread
from onebudget.planner.simulate.timeline import Timeline

steps = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=200)


@given(steps=steps, most=st.integers(1, 8))
def test_means_and_peaks_survive_the_merging(steps: list[tuple[int, int, int]], most: int) -> None:
    timeline, now = Timeline(most), 0.0
    for seconds, used, batch in steps:
        timeline.record(now, now + seconds, used, batch, 0)
        now += seconds
    points = timeline.points(now)
    assert len(points) <= most
    assert points[-1].until_s == now
    starts = [0.0, *(point.until_s for point in points)]
    total = sum(point.used_blocks * (point.until_s - start) for point, start in zip(points, starts, strict=False))
    assert total == pytest.approx(sum(seconds * used for seconds, used, _ in steps))
    assert max(point.peak_used_blocks for point in points) == max(used for _, used, _ in steps)


def test_percentiles_are_values_that_occurred() -> None:
    spread = Spread.of([float(value) for value in range(1, 101)])
    assert spread is not None
    assert spread.percentiles == ((50, 50.0), (90, 90.0), (95, 95.0), (99, 99.0))
    assert (spread.mean, spread.largest) == (50.5, 100.0)
    assert Spread.of([]) is None
