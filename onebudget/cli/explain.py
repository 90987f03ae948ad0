"""``onebudget explain``: a ledger in words, or what changed between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.boundary import DONE
from onebudget.cli.options import command
from onebudget.cli.output import Output
from onebudget.cli.reports import check_report_path, show_ledger, write_report

if TYPE_CHECKING:
    from rich.table import Table

    from onebudget.budget.explain import Difference

_CURVE_ROWS = 10
HELP = "Say in words how a ledger came about; with a second ledger, what changed."


@command
def explain(
    ledger: Annotated[Path, typer.Argument(help="JSON that `onebudget run --json` printed.", metavar="LEDGER.json")],
    other: Annotated[Path | None, typer.Argument(help="A later ledger to compare with.", metavar="OTHER.json")] = None,
    *,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page about the (later) ledger.")] = None,
    output: Output,
) -> int:
    """Explain one ledger, or the way from one to another."""
    from onebudget.report.document import read_document

    check_report_path(report)
    document = read_document(ledger)
    if other is None:
        _explain_one(document, output)
    else:
        before, document = document, read_document(other)
        _explain_two(before, document, output)
    write_report(document, report, output)
    return DONE


def _explain_one(document: Mapping[str, Any], output: Output) -> None:
    from rich.text import Text

    from onebudget.report.context_cap import cap_points, cap_table
    from onebudget.report.words import explain as in_words

    sentences, points = in_words(document), cap_points(document, most=_CURVE_ROWS)
    curve = {"context_cap": [asdict(point) for point in points]} if points else {}
    output.document({"explanation": sentences, **curve, "ledger": document})
    output.show(*(Text(sentence) for sentence in sentences))
    show_ledger(document, output)
    if points:
        output.show(cap_table(points))


def _explain_two(before: Mapping[str, Any], after: Mapping[str, Any], output: Output) -> None:
    from onebudget.budget.explain import diff
    from onebudget.budget.ledger import Ledger
    from onebudget.report.segments import subject

    changes = diff(Ledger.from_dict(before), Ledger.from_dict(after))
    output.document({"before": before, "after": after, "changes": [asdict(change) for change in changes]})
    names = (subject(before), subject(after))
    if names[0] != names[1]:
        output.show(f"before: {names[0]}", f"after: {names[1]}")
    output.show(_changes_table(changes) if changes else "Nothing changed: every share has the same bytes in both.")


def _changes_table(changes: tuple[Difference, ...]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what changed", no_wrap=True)
    for name in ("before", "after", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for change in changes:
        row = (_text(change.before), _text(change.after), _gap(change))
        table.add_row(Text(change.name), *map(Text, row), change.unit)
    return table


def _text(value: object) -> str:
    return f"{value:,}" if type(value) is int else "-" if value is None else str(value)


def _gap(change: Difference) -> str:
    if type(change.before) is int and type(change.after) is int:
        return f"{change.after - change.before:+,}"
    return ""
