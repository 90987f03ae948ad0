"""The ledger as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from onebudget.report.palette import colour_of
from onebudget.report.segments import Document, Segment, cap_value, has_measurement, segments_of, subject
from onebudget.units import format_bytes

WHY_COLUMN_FROM_WIDTH, WHY_COLUMN_BESIDE_MEASURED = 110, 150
PEAK_COLUMN_FROM_WIDTH = 132
OWNER_COLUMNS_FROM_WIDTH = 112
HUMAN_COLUMN_FROM_WIDTH = 90
HOW_MEASURED = "Measured is what was held when the run ended. What nobody held then counts as unassigned."


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of the ledger table there is room for; exact bytes always stay."""

    measured: bool
    peak: bool
    human: bool
    owner: bool
    why: bool

    @classmethod
    def for_width(cls, width: int, *, measured: bool) -> Columns:
        return cls(
            measured=measured,
            peak=measured and width >= PEAK_COLUMN_FROM_WIDTH,
            human=not measured or width >= HUMAN_COLUMN_FROM_WIDTH,
            owner=not measured or width >= OWNER_COLUMNS_FROM_WIDTH,
            why=width >= (WHY_COLUMN_BESIDE_MEASURED if measured else WHY_COLUMN_FROM_WIDTH),
        )


def ledger_view(document: Document, *, width: int) -> Group:
    """Everything a person wants after a run: the sum, the KV line, the caps, warnings and notes.

    Where the table has no room for the reasons, they stand under it.
    """
    segments = segments_of(document)
    columns = Columns.for_width(width, measured=has_measurement(document))
    parts: list[RenderableType] = [ledger_table(document, segments, columns)]
    if not columns.why:
        parts.append(reasons(segments))
    if columns.measured:
        parts.append(Text(HOW_MEASURED, style="dim"))
    parts.append(Text(kv_line(document)))
    if document.get("caps"):
        parts.append(caps_table(document["caps"]))
    parts.extend(remarks(document))
    return Group(*parts)


def kv_line(document: Document) -> str:
    """What the KV cache is worth in requests."""
    kv = document["kv_cache"]
    concurrency = kv.get("max_concurrency_at_max_seq_len") or 0
    longest = f", {concurrency:,.1f} requests of max_seq_len at once" if concurrency else ""
    return f"The KV cache holds {kv['tokens']:,} tokens in {kv['blocks']:,} blocks{longest}."


def ledger_table(document: Document, segments: Sequence[Segment], columns: Columns) -> Table:
    """One row per share, a total row that is the capacity, and measured columns where there was a run."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, title_justify="left", title=title(document))
    capacity = sum(segment.planned_bytes for segment in segments)
    table.add_column("share", footer="total", no_wrap=True)
    if columns.human:
        table.add_column("planned", footer=format_bytes(capacity), justify="right", no_wrap=True)
    table.add_column("planned bytes", footer=f"{capacity:,}", justify="right", no_wrap=True)
    if columns.measured:
        total = sum(segment.measured_bytes or 0 for segment in segments)
        table.add_column("measured bytes", footer=f"{total:,}", justify="right", no_wrap=True)
        table.add_column("difference", footer=signed(total - capacity), justify="right", no_wrap=True)
    if columns.peak:
        table.add_column("peak use", justify="right", no_wrap=True)
    if columns.owner:
        table.add_column("basis", no_wrap=True)
        table.add_column("owner", no_wrap=True)
    if columns.why:
        table.add_column("why", overflow="fold")
    for segment in segments:
        table.add_row(*_row(segment, columns))
    return table


def _row(segment: Segment, columns: Columns) -> list[RenderableType]:
    row: list[RenderableType] = [Text("\u25a0 ", style=colour_of(segment.name)).append(segment.name, style="default")]
    if columns.human:
        row.append(format_bytes(segment.planned_bytes))
    row.append(f"{segment.planned_bytes:,}")
    if columns.measured:
        difference = segment.difference_bytes
        row.append("-" if segment.measured_bytes is None else f"{segment.measured_bytes:,}")
        row.append("" if difference is None else signed(difference))
    if columns.peak:
        row.append("-" if segment.peak_bytes is None else f"{segment.peak_bytes:,}")
    if columns.owner:
        row += [Text(segment.basis), Text(segment.owner)]
    return [*row, Text(segment.why)] if columns.why else row


def signed(difference: int) -> str:
    """A difference with its sign; 0 has none."""
    return f"{difference:+,}" if difference else "0"


def title(document: Document) -> str:
    """What the table is about, escaped for rich."""
    name = f"{subject(document)}, {format_bytes(document['capacity_bytes'])}"
    if document.get("fits", True):
        return escape(name)
    return escape(f"{name} - does not fit, short of {format_bytes(document['shortfall_bytes'])}")


def reasons(segments: Sequence[Segment]) -> Text:
    """Why each share above 0 has its size, one line each."""
    shown = [segment for segment in segments if segment.planned_bytes and segment.why]
    lines = [f"{segment.name} ({_known(segment)}): {segment.why}" for segment in shown]
    return Text("\n".join([*lines, ""]))


def _known(segment: Segment) -> str:
    return ", ".join(word for word in (segment.basis, segment.owner) if word)


def caps_table(caps: Sequence[Mapping[str, Any]]) -> Table:
    """The limits on the KV cache; the one that decided is marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="caps on the KV cache", title_justify="left")
    table.add_column("cap", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("allows (bytes)", justify="right", no_wrap=True)
    table.add_column("")
    for cap in caps:
        table.add_row(Text(cap["name"]), cap_value(cap), f"{cap['limit_bytes']:,}", "binding" if cap["binding"] else "")
    return table


def remarks(document: Document) -> list[Text]:
    """Ways out when it does not fit, then warnings, then notes."""
    changes = [Text(change_sentence(change), style="bold") for change in document.get("changes", ())]
    warnings = [Text(f"warning: {line}", style="yellow") for line in document.get("warnings", ())]
    notes = [Text(f"note: {line}", style="dim") for line in document.get("notes", ())]
    return changes + warnings + notes


def change_sentence(change: Mapping[str, Any]) -> str:
    """One way out as a sentence."""
    settings = ", ".join(f"{name} = {value}" for name, value in change["set"].items())
    verdict = "then it fits" if change.get("fits") else "not enough by itself"
    return f"set {settings}: gains {format_bytes(change['gains_bytes'])}, {verdict}"


def run_lines(document: Document) -> list[str]:
    """Throughput and counters of a run, one line each; nothing for a ledger without a run."""
    return [line for line in (_facts(name, document.get(name) or {}) for name in ("throughput", "counters")) if line]


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    single = {name: value for name, value in facts.items() if not isinstance(value, (dict, list))}
    words = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in single.items())
    return f"{title}: {words}" if words else ""


def _number(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
