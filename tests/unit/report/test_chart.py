from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("plotly")
from onebudget.report.chart import chart, tick_bytes
from onebudget.report.segments import segments_of


def test_bars_of_the_whole_card_add_up_to_it_on_both_sides(run_document: dict[str, Any]) -> None:
    segments = segments_of(run_document)
    traces = [trace for trace in chart(segments, measured=True).data if trace.yaxis == "y"]
    assert [trace.name for trace in traces] == [segment.name for segment in segments]
    for row in (0, 1):
        assert sum(trace.x[row] for trace in traces) == run_document["capacity_bytes"]


def test_small_shares_are_drawn_again_at_their_own_scale(run_document: dict[str, Any]) -> None:
    figure = chart(segments_of(run_document), measured=True)
    small = [trace for trace in figure.data if trace.yaxis == "y2"]
    assert {trace.name for trace in small} == {
        "activations", "context", "multimodal_encoder", "fixed_workspace", "penalty_workspace",
    }  # fmt: skip
    assert figure.layout.xaxis2.range[1] == max(sum(trace.x[row] for trace in small) for row in (0, 1))


def test_every_point_knows_its_segment_and_tells_its_formula(run_document: dict[str, Any]) -> None:
    segments = segments_of(run_document)
    for trace in chart(segments, measured=True).data:
        for row, template in enumerate(trace.hovertemplate):
            segment = segments[trace.customdata[row][0]]
            assert segment.name == trace.name
            assert f"{trace.x[row]:,} B" in template
            assert segment.why.split()[0] in template


def test_a_plan_has_one_bar_and_no_second_panel_without_small_shares(plan_document: dict[str, Any]) -> None:
    figure = chart(segments_of(plan_document), measured=False)
    assert all(list(trace.y) == ["planned"] for trace in figure.data)
    large = [segment for segment in segments_of(plan_document) if segment.name in ("weights", "kv_cache")]
    assert all(trace.yaxis == "y" for trace in chart(large, measured=False).data)


@pytest.mark.parametrize("longest", [1, 5, 1000, 2**31 - 1, 2**36, 80 * 2**30])
def test_ticks_are_round_and_few(longest: int) -> None:
    step = tick_bytes(longest)
    assert step & (step - 1) == 0
    assert step * 5 >= longest
