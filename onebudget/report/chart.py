"""The interactive picture of the card: stacked bars, planned beside measured, drawn by plotly."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onebudget.report.palette import colour_of, ink_on
from onebudget.report.segments import KV_CACHE, UNASSIGNED, Segment
from onebudget.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    import plotly.graph_objects as go

CHART_ID = "card"
_LARGE_SHARES = frozenset({"weights", KV_CACHE, UNASSIGNED, "fraction_slack"})
_ROW_PX, _MARGIN_PX = 74, 64
_CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False, "doubleClick": False, "showTips": False}


def chart_html(segments: Sequence[Segment], *, measured: bool) -> str:
    """The chart as a ``<div>`` with its script; plotly's own source must already stand in the page."""
    import plotly.io

    return str(
        plotly.io.to_html(
            chart(segments, measured=measured), include_plotlyjs=False, full_html=False, config=_CONFIG, div_id=CHART_ID
        )
    )


def chart(segments: Sequence[Segment], *, measured: bool) -> go.Figure:
    """The whole card on top; below it, at a scale of their own, the shares too thin to see there.

    ``customdata`` of every point is the index of its segment, so that a page can show more about it.
    """
    from plotly.subplots import make_subplots

    small = [at for at, segment in enumerate(segments) if segment.name not in _LARGE_SHARES and _largest(segment)]
    rows = ["measured", "planned"] if measured else ["planned"]
    panels = 2 if small else 1
    figure = make_subplots(rows=panels, cols=1, vertical_spacing=0.22 if measured else 0.34)
    _draw(figure, 1, segments, range(len(segments)), rows)
    if small:
        _draw(figure, 2, segments, small, rows)
    _lay_out(figure, panels, len(rows))
    return figure


def _draw(figure: go.Figure, panel: int, segments: Sequence[Segment], chosen: Sequence[int], rows: list[str]) -> None:
    import plotly.graph_objects as go

    for at in chosen:
        segment = segments[at]
        sizes = [_bytes_in(segment, row) for row in rows]
        colour = colour_of(segment.name)
        bar = go.Bar(
            y=rows, x=sizes, orientation="h", name=segment.name, customdata=[[at]] * len(rows),
            marker={"color": colour, "line": {"color": "#ffffff", "width": 1}},
            text=[segment.name.replace("_", " ")] * len(rows), textposition="inside",
            insidetextanchor="middle", textangle=0,
            textfont={"color": ink_on(colour), "size": 12}, constraintext="inside", cliponaxis=True,
            hovertemplate=[_hover(segment, row, size) for row, size in zip(rows, sizes, strict=True)],
        )  # fmt: skip
        figure.add_trace(bar, row=panel, col=1)
    longest = max(sum(_bytes_in(segments[at], row) for at in chosen) for row in rows)
    _scale(figure, panel, longest)


def _bytes_in(segment: Segment, row: str) -> int:
    return segment.planned_bytes if row == "planned" else segment.measured_bytes or 0


def _largest(segment: Segment) -> int:
    return max(segment.planned_bytes, segment.measured_bytes or 0)


def _hover(segment: Segment, row: str, nbytes: int) -> str:
    why = "<br>".join(textwrap.wrap(segment.why, 46)) or "-"
    owner = f", owner {segment.owner}" if segment.owner else ""
    text = f"<b>{segment.name}</b> {row}: {format_bytes(nbytes)}<br>{nbytes:,} B<br>{segment.basis}{owner}<br>{why}"
    return text.replace("%{", "% {") + "<extra></extra>"


def _scale(figure: go.Figure, panel: int, longest: int) -> None:
    step = tick_bytes(longest)
    marks = list(range(0, longest + 1, step))
    unit, name = (GIB, "GiB") if longest >= 2 * GIB else (MIB, "MiB")
    texts = [f"{mark / unit:g} {name}" if mark else "0" for mark in marks]
    figure.update_xaxes(
        row=panel,
        col=1,
        range=[0, longest],
        tickmode="array",
        tickvals=marks,
        ticktext=texts,
        fixedrange=True,
        showgrid=True,
    )
    figure.update_yaxes(row=panel, col=1, fixedrange=True)


def tick_bytes(longest: int) -> int:
    """The smallest round step (1, 2 or 5 times a power of two of bytes) that gives at most five ticks."""
    step = 1
    while step * 5 < longest:
        step *= 2
    return step


def _lay_out(figure: go.Figure, panels: int, rows: int) -> None:
    layout: dict[str, Any] = {
        "barmode": "stack", "bargap": 0.18, "showlegend": False, "dragmode": False, "hovermode": "closest",
        "height": panels * (rows * _ROW_PX + _MARGIN_PX), "margin": {"l": 78, "r": 24, "t": 30, "b": 34},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "template": "none",
        "font": {"family": "system-ui, sans-serif", "size": 13}, "uniformtext": {"minsize": 11, "mode": "hide"},
        "hoverlabel": {"align": "left"},
    }  # fmt: skip
    figure.update_layout(**layout)
    titles = ["the whole card", "magnified: the small shares"]
    for panel, title in enumerate(titles[:panels], start=1):
        domain = figure.layout["yaxis" if panel == 1 else f"yaxis{panel}"].domain
        figure.add_annotation(
            text=title, xref="paper", yref="paper", x=0, y=domain[1], xanchor="left", yanchor="bottom", showarrow=False
        )
