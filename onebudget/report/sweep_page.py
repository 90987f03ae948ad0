"""A sweep as one self-contained page: tokens against price or cards, and every point in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from onebudget.report.palette import colour_of
from onebudget.report.shell import section, shell
from onebudget.report.sweep import COLUMNS, NUMBERS, Row, cards, cells_of, headline, layout, settings, sorted_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

_CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False, "doubleClick": False, "showTips": False}
_MODEL_COLOURS = ("weights", "kv_cache", "activations", "graphs", "fixed_workspace", "recurrent_state", "lora")


def sweep_page(document: Mapping[str, Any]) -> str:
    """The whole page as text, plotly's source included (about 5 MB)."""
    rows = sorted_rows(document["rows"])
    best = [row for row in rows if row["pareto"]]
    fitting = [row for row in rows if row["fits"]]
    sections = [
        section("KV tokens against what they cost", _chart(pareto_chart(fitting)) if fitting else ""),
        section("What no other point beats", _table(best)),
        section("All points", _table(rows)),
    ]
    head = f'<h1>Sweep</h1><div class="facts dim"><span>{escape(headline(document))}</span></div>'
    return shell("Sweep", head + "".join(sections))


def pareto_chart(rows: Sequence[Row]) -> go.Figure:
    """A point per plan, a line through those that no other beats, one colour per model."""
    from plotly.graph_objects import Figure

    priced = all(row["usd_per_hour"] is not None for row in rows)
    key = "usd_per_hour" if priced else "cards"
    figure = Figure()
    for at, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        colour = colour_of(_MODEL_COLOURS[at % len(_MODEL_COLOURS)])
        own = [row for row in rows if row["model"] == model]
        best = sorted((row for row in own if row["pareto"]), key=lambda row: (row[key], row["kv_tokens"]))
        _add(figure, [row for row in own if not row["pareto"]], key, model, mode="markers", marker=_dot(colour, 7, 0.4))
        line = {"color": colour, "shape": "hv", "width": 1}
        _add(figure, best, key, f"{model}, best", mode="lines+markers", marker=_dot(colour, 11, 1.0), line=line)
    figure.update_layout(
        height=460, margin={"l": 90, "r": 24, "t": 40, "b": 54}, template="none", dragmode=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 13}, hoverlabel={"align": "left"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
    figure.update_xaxes(title_text="USD per hour" if priced else "cards", fixedrange=True, rangemode="tozero")
    figure.update_yaxes(title_text="KV tokens", fixedrange=True, rangemode="tozero")
    return figure


def _add(figure: go.Figure, rows: Sequence[Row], key: str, name: str, **style: Any) -> None:
    if rows:
        figure.add_scatter(
            x=[row[key] for row in rows], y=[row["kv_tokens"] for row in rows], name=name,
            hovertemplate=[_hover(row) for row in rows], **style,
        )  # fmt: skip


def _dot(colour: str, size: int, opacity: float) -> dict[str, Any]:
    return {"color": colour, "size": size, "opacity": opacity}


def _hover(row: Row) -> str:
    words = [
        f"<b>{escape(row['model'])}</b>",
        escape(f"{cards(row)}, {row['engine']} {row['engine_version'] or ''}, {layout(row)}"),
        escape(settings(row)),
        f"{row['kv_tokens']:,} KV tokens, {row['concurrency']:,.2f} at once, {row['waste']:.1%} unused",
    ]
    return "<br>".join(word for word in words if word) + "<extra></extra>"


def _chart(figure: go.Figure) -> str:
    import plotly.io

    return str(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=_CONFIG, div_id="pareto"))


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th class="{_kind(at)}">{escape(name)}</th>' for at, name in enumerate(COLUMNS))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{_kind(at)}">{escape(cell)}</td>' for at, cell in enumerate(cells_of(row)))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(at: int) -> str:
    return "number" if at in NUMBERS else ""
