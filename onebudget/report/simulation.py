"""A simulated trace as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]
DURATIONS = {
    "time_to_first_token_s": "time to first token",
    "time_per_token_s": "time per token",
    "time_to_last_token_s": "time to last token",
}
SPREAD_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_HISTOGRAM_ROWS = 12
_BAR_CELLS = 40


def simulation_view(document: Document) -> list[RenderableType]:
    """Everything a person wants to know: counts, durations, batch sizes, and what the clock assumed."""
    lines = [Text(f"{name}: {value}") for name, value in facts(document)]
    parts: list[RenderableType] = [*lines, durations_table(document)]
    if document["batch_size_histogram"]:
        parts.append(histogram_table(document["batch_size_histogram"]))
    return [*parts, Text(f"clock: {clock_line(document['clock'])}", style="dim"), *_notes(document)]


def facts(document: Document) -> list[tuple[str, str]]:
    """What happened, in a line each."""
    requests, steps, kv = document["requests"], document["steps"], document["kv"]
    lost = [f"{requests[name]:,} {name}" for name in ("refused", "failed") if requests[name]]
    put_off = [f"{steps[name]:,} {name}" for name in ("deferred", "skipped", "paused")]
    share = kv["mean_used_blocks"] / kv["blocks"] if kv["blocks"] else 0.0
    return [
        ("trace", f"{document['trace']}, {document['virtual_s']:,.1f} s of virtual time"),
        ("requests", ", ".join([f"{requests['submitted']:,} submitted, {requests['finished']:,} finished", *lost])),
        ("steps", f"{steps['total']:,}, {steps['decode']:,} of them decode alone"),
        (
            "tokens",
            f"{steps['context_tokens']:,} of prompts computed, {steps['generation_tokens']:,} generated "
            f"({document['tokens_per_s']:,.1f} per second)",
        ),
        ("put off", f"{', '.join(put_off)}, {steps['trimmed']:,} tokens trimmed"),
        (
            "KV cache",
            f"{kv['blocks']:,} blocks of {kv['tokens_per_block']} tokens, {kv['peak_used_blocks']:,} used at most, "
            f"{share:.1%} on average",
        ),
        (
            "prefixes",
            f"{kv['hit_rate']:.2%} of prompt tokens found: {kv['reused_tokens']:,} of {kv['prompt_tokens']:,}, "
            f"{kv['reused_blocks']:,} blocks found and {kv['missed_blocks']:,} not, "
            f"{kv['counters']['evicted']:,} evicted",
        ),
    ]


def durations_table(document: Document) -> Table:
    """Percentiles in seconds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("seconds", no_wrap=True)
    for name in SPREAD_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for title, cells in duration_rows(document):
        table.add_row(title, *cells)
    return table


def duration_rows(document: Document) -> list[tuple[str, list[str]]]:
    """One row per kind of duration; dashes where no request gave one."""
    rows = []
    for key, title in DURATIONS.items():
        spread = document[key]
        rows.append((title, ["-" if spread is None else f"{spread[name]:,.4f}" for name in SPREAD_COLUMNS]))
    return rows


def histogram_table(histogram: Mapping[str, float]) -> Table:
    """How many decode steps had how many requests, in a few ranges of sizes."""
    ranges = histogram_ranges({int(size): count for size, count in histogram.items()}, _HISTOGRAM_ROWS)
    most = max(count for _, _, count in ranges)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("decode batch", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("")
    for low, high, count in ranges:
        name = f"{low}" if low == high else f"{low} to {high}"
        table.add_row(name, f"{count:,g}", Text("\u2588" * round(_BAR_CELLS * count / most)))
    return table


def histogram_ranges(histogram: Mapping[int, float], rows: int) -> list[tuple[int, int, float]]:
    """``(smallest size, largest size, steps)`` of at most ``rows`` ranges of equal width that cover all sizes."""
    low, high = min(histogram), max(histogram)
    width = -(-(high - low + 1) // rows)
    counts: dict[int, float] = {}
    for size, count in histogram.items():
        counts[(size - low) // width] = counts.get((size - low) // width, 0) + count
    last = (high - low) // width
    starts = [low + at * width for at in range(last + 1)]
    return [(start, min(high, start + width - 1), counts.get(at, 0)) for at, start in enumerate(starts)]


def clock_line(clock: Mapping[str, Any]) -> str:
    """Every figure the clock used; of a table where it came from."""
    if clock["kind"] == "table":
        return f"{len(clock['rows'])} measured steps from {clock['source']}, {clock['formula']}"
    figures = [f"{name} = {_figure(value)}" for name, value in clock.items() if name not in ("kind", "formula")]
    return f"{clock['formula']}; {', '.join(figures)}"


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)


def _notes(document: Document) -> Sequence[Text]:
    return [Text(f"note: {line}", style="dim") for line in document["notes"]]
