"""A simulated trace as one self-contained page: KV use and batch size over virtual time, batch sizes, durations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from onebudget.report.palette import colour_of
from onebudget.report.segments import KV_CACHE
from onebudget.report.shell import section, shell
from onebudget.report.simulation import SPREAD_COLUMNS, Document, duration_rows, facts

if TYPE_CHECKING:
    import plotly.graph_objects as go

_CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False, "doubleClick": False, "showTips": False}
_INK = {"family": "system-ui, sans-serif", "size": 13}


def simulation_page(document: Document) -> str:
    """The whole page as text, plotly's source included (about 5 MB)."""
    sections = [
        section("Over virtual time", _chart(timeline_chart(document), "timeline")),
        section("Requests of a decode step", _histogram(document)),
        section("Seconds", _table(["", *SPREAD_COLUMNS], duration_rows(document))),
        section("What happened", _table(["", ""], [(name, [value]) for name, value in facts(document)])),
        section("Clock", _table(["", ""], _clock_rows(document["clock"]))),
        section("Settings", _table(["", ""], [(name, [str(value)]) for name, value in document["settings"].items()])),
        section("Notes", "".join(f'<p class="dim">{escape(line)}</p>' for line in document["notes"])),
    ]
    return shell(f"Simulation: {document['trace']}", _head(document) + "".join(sections))


def _head(document: Document) -> str:
    kv, requests = document["kv"], document["requests"]
    spans = [
        f"{requests['finished']:,} of {requests['submitted']:,} requests finished",
        f"{kv['hit_rate']:.2%} of prompt tokens found in the cache",
        f"{kv['blocks']:,} blocks of {kv['tokens_per_block']} tokens",
        f"{document['tokens_per_s']:,.1f} tokens per second",
    ]
    shown = "".join(f"<span>{escape(text)}</span>" for text in spans)
    return f'<h1>{escape(document["trace"])}</h1><div class="facts dim">{shown}</div>'


def timeline_chart(document: Document) -> go.Figure:
    """Blocks in use above, requests in a step and in line below, over the same virtual time."""
    from plotly.subplots import make_subplots

    points: Sequence[Mapping[str, Any]] = document["timeline"]
    times = [0.0, *(point["until_s"] for point in points)]
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.09)

    def add(name: str, key: str, row: int, colour: str, **more: Any) -> None:
        values = [point[key] for point in points]
        line = {"color": colour_of(colour), "shape": "vh", **more}
        figure.add_scatter(x=times, y=[*values[:1], *values], name=name, mode="lines", line=line, row=row, col=1)

    add("blocks used, highest", "peak_used_blocks", 1, "context_workspace", dash="dot", width=1)
    add("blocks used, mean", "used_blocks", 1, KV_CACHE)
    add("requests in a step", "batch", 2, "weights")
    add("requests waiting", "waiting", 2, "activations")
    if document["kv"]["peak_used_blocks"] * 4 > document["kv"]["blocks"]:
        ends = [times[0], times[-1]]
        figure.add_scatter(
            x=ends, y=[document["kv"]["blocks"]] * 2, name="blocks of the pool", mode="lines",
            line={"color": colour_of("unassigned"), "dash": "dash"}, row=1, col=1,
        )  # fmt: skip
    _lay_out(figure, height=520)
    figure.update_yaxes(title_text="blocks", row=1, col=1)
    figure.update_yaxes(title_text="requests", row=2, col=1)
    figure.update_xaxes(title_text="virtual seconds", row=2, col=1)
    return figure


def histogram_chart(histogram: Mapping[str, float]) -> go.Figure:
    """Steps over their number of requests."""
    from plotly.graph_objects import Figure

    figure = Figure()
    sizes = sorted(map(int, histogram))
    counts = [histogram[str(size)] for size in sizes]
    figure.add_bar(x=sizes, y=counts, name="decode steps", marker={"color": colour_of("graphs")})
    _lay_out(figure, height=280)
    figure.update_xaxes(title_text="requests")
    figure.update_yaxes(title_text="steps")
    return figure


def _lay_out(figure: go.Figure, height: int) -> None:
    figure.update_layout(
        height=height, margin={"l": 78, "r": 24, "t": 34, "b": 50}, template="none", dragmode=False, font=_INK,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="x", hoverlabel={"align": "left"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}, bargap=0.1,
    )  # fmt: skip
    figure.update_xaxes(fixedrange=True)
    figure.update_yaxes(fixedrange=True, rangemode="tozero")


def _chart(figure: go.Figure, name: str) -> str:
    import plotly.io

    return str(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=_CONFIG, div_id=name))


def _histogram(document: Document) -> str:
    histogram = document["batch_size_histogram"]
    return _chart(histogram_chart(histogram), "histogram") if histogram else ""


def _clock_rows(clock: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    shown = {name: value for name, value in clock.items() if name != "rows"}
    return [(name, [f"{value:,}" if type(value) is int else str(value)]) for name, value in shown.items()]


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f'<th class="{"number" if at else ""}">{escape(name)}</th>' for at, name in enumerate(heads))
    numbers = len(heads) > 2
    body = "".join(f"<tr><td>{escape(name)}</td>{_cells(cells, numbers=numbers)}</tr>" for name, cells in rows)
    shown = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll"><table>{shown}<tbody>{body}</tbody></table></div>'


def _cells(cells: Sequence[str], *, numbers: bool) -> str:
    return "".join(f'<td class="{"number" if numbers else "why"}">{escape(cell)}</td>' for cell in cells)
