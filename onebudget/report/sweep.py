"""A sweep as a table: what no other point beats first, then the rest, then what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from onebudget.units import format_bytes

Row = Mapping[str, Any]
COLUMNS = (
    "",
    "model",
    "cards",
    "engine",
    "layout",
    "settings",
    "KV tokens",
    "concurrency",
    "waste",
    "USD/h",
    "KV cache",
)
NUMBERS = frozenset(range(6, 11))
PARETO_MARK = "*"
MOST_ROWS = 60


def sweep_view(document: Mapping[str, Any]) -> list[Table | Text]:
    """The table for a terminal, at most ``MOST_ROWS`` rows, and a line on what was left out."""
    rows = sorted_rows(document["rows"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if at in NUMBERS else "left", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*(Text(cell) for cell in cells_of(row)), style="bold" if row["pareto"] else None)
    parts: list[Table | Text] = [table, Text(headline(document))]
    if len(rows) > MOST_ROWS:
        parts.append(Text(f"{len(rows) - MOST_ROWS:,} more rows: --json or --report has them all.", style="dim"))
    return parts


def headline(document: Mapping[str, Any]) -> str:
    """How many points there are, fit, and were refused."""
    best = sum(row["pareto"] for row in document["rows"])
    refused = f", {document['refused']:,} refused" if document["refused"] else ""
    counts = f"{document['points']:,} points: {document['fitting']:,} fit{refused}"
    return f"{counts}; {PARETO_MARK} marks {best:,} that no other beats."


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    """By model; within it the front, what else fits by tokens, what does not fit by shortfall, what was refused."""
    return sorted(
        rows,
        key=lambda row: (
            row["model"],
            row["refused"] is not None,
            not row["fits"],
            not row["pareto"],
            -row["kv_tokens"],
            row["shortfall_bytes"],
        ),
    )


def cells_of(row: Row) -> list[str]:
    """One cell per column of ``COLUMNS``."""
    engine = f"{row['engine']} {row['engine_version'] or ''}".rstrip()
    head = [PARETO_MARK if row["pareto"] else "", row["model"], cards(row), engine, layout(row), settings(row)]
    if row["refused"] is not None:
        return [*head, "refused", "", "", "", row["refused"]]
    price = "" if row["usd_per_hour"] is None else f"{row['usd_per_hour']:,.2f}"
    if not row["fits"]:
        return [*head, "does not fit", "", "", price, f"{format_bytes(row['shortfall_bytes'])} short"]
    return [
        *head, f"{row['kv_tokens']:,}", f"{row['concurrency']:,.2f}", f"{row['waste']:.1%}", price,
        format_bytes(row["kv_bytes"]),
    ]  # fmt: skip


def cards(row: Row) -> str:
    """``8 x H100-SXM-80GB``."""
    return f"{row['cards']} x {row['gpu']}" if row["cards"] else str(row["gpu"])


def layout(row: Row) -> str:
    """``tp 4 pp 2``: what is more than one."""
    return " ".join(f"{name} {row[name]}" for name in ("tp", "pp", "ep", "dp") if row[name] > 1) or "-"


def settings(row: Row) -> str:
    """What was set, formats included."""
    words = [f"{name}={row[name]}" for name in ("weights_dtype", "kv_dtype") if row[name] is not None]
    return " ".join([*words, *(f"{name}={value}" for name, value in row["settings"].items())])
