"""Graph batch sizes as tables and a picture for a terminal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onebudget.report.palette import colour_of
from onebudget.units import format_bytes

Document = Mapping[str, Any]
_BAR_CELLS = 48
_PICTURE_ROWS = 24


def buckets_view(document: Document) -> list[RenderableType]:
    """The list, its picture, the defaults beside it, and what to paste."""
    best = document["recommended"]
    return [
        Text(f"load: {document['load']}, at most {document['max_batch_size']} requests in a step"),
        Text(f"allowance: {format_bytes(document['allowance_bytes'])} ({document['allowance_basis']})"),
        Text(f"bytes per graph: {document['bytes_per_bucket']['basis']}"),
        Text(f"capture {', '.join(map(str, best['sizes'])) or 'nothing: no graph fits the allowance'}", style="bold"),
        Text(
            f"{len(best['sizes'])} graphs, {format_bytes(best['graph_bytes'])}, {best['hit_rate']:.2%} of steps hit, "
            f"{best['padded_share']:.2%} of their rows are padding"
        ),
        *picture(document),
        comparison_table(document),
        *(Text(f"{engine}: {flag}", overflow="fold") for engine, flag in document["flags"].items()),
        *(Text(f"note: {line}", style="dim") for line in document["notes"]),
    ]


def comparison_table(document: Document) -> Table:
    """One row per default list: what it wastes, and what the best list within the same bytes wastes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("default list", no_wrap=True)
    for name in ("graphs", "bytes", "hits", "padding", "planned graphs", "hits", "padding", "fewer padded rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in document["comparisons"]:
        default, planned = row["default"], row["planned"]
        fewer = f"{row['fewer_share']:.1%}" if row["judged"] else f"{row['fewer_share']:.1%} (hardly any to avoid)"
        table.add_row(default["name"], *_figures(default, with_bytes=True), *_figures(planned), fewer)
    return table


def _figures(figures: Mapping[str, Any], *, with_bytes: bool = False) -> list[str]:
    size = [format_bytes(figures["graph_bytes"])] if with_bytes else []
    return [str(len(figures["sizes"])), *size, f"{figures['hit_rate']:.2%}", f"{figures['padded_share']:.2%}"]


def picture(document: Document) -> list[Text]:
    """A bar per captured size (or range of them): rows that requests need, then rows of padding."""
    rows = _bucket_rows(document["recommended"]["sizes"], {int(s): w for s, w in document["histogram"].items()})
    groups = _grouped(rows, _PICTURE_ROWS)
    most = max((live + padding for _, live, padding in groups), default=0)
    if not most:
        return []
    width = max(len(name) for name, _, _ in groups)
    lines = [Text("rows computed by size of the graph: \u2588 requests, \u2591 padding", style="dim")]
    for name, live, padding in groups:
        line = Text(f"{name:>{width}} ")
        line.append("\u2588" * round(_BAR_CELLS * live / most), style=colour_of("kv_cache"))
        lines.append(line.append("\u2591" * round(_BAR_CELLS * padding / most), style=colour_of("fragmentation")))
    return lines


def _bucket_rows(sizes: Sequence[int], histogram: Mapping[int, float]) -> list[tuple[int, float, float]]:
    """(size, rows of requests, rows of padding) of each graph."""
    live, padding = [0.0] * len(sizes), [0.0] * len(sizes)
    for size, weight in histogram.items():
        at = bisect_left(sizes, size)
        if at < len(sizes):
            live[at] += size * weight
            padding[at] += (sizes[at] - size) * weight
    return list(zip(sizes, live, padding, strict=True))


def _grouped(rows: Sequence[tuple[int, float, float]], most: int) -> list[tuple[str, float, float]]:
    """At most ``most`` rows, neighbours together where there are more."""
    step = max(1, -(-len(rows) // most))
    groups = [rows[start : start + step] for start in range(0, len(rows), step)]
    return [
        (
            str(group[0][0]) if len(group) == 1 else f"{group[0][0]} to {group[-1][0]}",
            sum(row[1] for row in group),
            sum(row[2] for row in group),
        )
        for group in groups
    ]
