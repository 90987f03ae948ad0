"""The trade between KV cache and context workspace as a picture, drawn by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onebudget.report.context_cap import CapPoint
from onebudget.report.palette import colour_of
from onebudget.report.segments import KV_CACHE
from onebudget.units import format_bytes

if TYPE_CHECKING:
    import plotly.graph_objects as go

CHART_ID = "context-cap"
_HEIGHT_PX = 320
_CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False, "doubleClick": False, "showTips": False}


def cap_chart_html(points: Sequence[CapPoint]) -> str:
    """The chart as a ``<div>`` with its script; plotly's own source must already stand in the page."""
    import plotly.io

    figure = cap_chart(points)
    return str(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=_CONFIG, div_id=CHART_ID))


def cap_chart(points: Sequence[CapPoint]) -> go.Figure:
    """KV tokens over the admission cap on the left axis, steps that a full batch of long prompts takes on the right."""
    from plotly.subplots import make_subplots

    figure = make_subplots(specs=[[{"secondary_y": True}]])
    caps = [point.attended_tokens_cap for point in points]
    figure.add_scatter(
        x=caps, y=[point.kv_tokens for point in points], name="KV tokens", mode="lines+markers",
        line={"color": colour_of(KV_CACHE)}, hovertemplate=[_hover(point) for point in points],
    )  # fmt: skip
    figure.add_scatter(
        x=caps, y=[point.steps_for_a_batch for point in points], name="steps for a full batch", mode="lines",
        line={"color": colour_of("context_workspace"), "shape": "hv", "dash": "dot"}, hoverinfo="skip",
        secondary_y=True,
    )  # fmt: skip
    chosen = [point for point in points if point.chosen]
    figure.add_scatter(
        x=[point.attended_tokens_cap for point in chosen], y=[point.kv_tokens for point in chosen], name="chosen",
        mode="markers", marker={"color": "#111111", "size": 13, "symbol": "diamond"},
        hovertemplate=[_hover(point) for point in chosen],
    )  # fmt: skip
    _lay_out(figure)
    return figure


def _hover(point: CapPoint) -> str:
    return (
        f"<b>{point.attended_tokens_cap:,} attended tokens</b><br>{point.prompts_at_once:,} prompts of max_seq_len at "
        f"once, {point.steps_for_a_batch:,} steps for a full batch<br>workspace {format_bytes(point.workspace_bytes)}"
        f"<br>KV cache {format_bytes(point.kv_bytes)}, {point.kv_tokens:,} tokens<extra></extra>"
    )


def _lay_out(figure: go.Figure) -> None:
    figure.update_layout(
        height=_HEIGHT_PX, margin={"l": 78, "r": 60, "t": 30, "b": 58}, template="none", dragmode=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 13}, hoverlabel={"align": "left"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
    figure.update_xaxes(title_text="attended tokens of one step", fixedrange=True, rangemode="tozero")
    figure.update_yaxes(title_text="KV tokens", fixedrange=True, rangemode="tozero", secondary_y=False)
    figure.update_yaxes(
        title_text="steps", fixedrange=True, rangemode="tozero", showgrid=False, tickmode="auto", tickformat=",d",
        secondary_y=True,
    )  # fmt: skip
