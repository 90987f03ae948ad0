"""The ledger on the terminal and as an HTML page, for every command that has one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebudget.cli.output import check_writable, write_text
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.cli.output import Output


def present(document: Mapping[str, Any], report: Path | None, output: Output) -> None:
    """A ledger in every form that was asked for: JSON, tables, page."""
    output.document(document)
    show_ledger(document, output)
    write_report(document, report, output)


def show_ledger(document: Mapping[str, Any], output: Output) -> None:
    """The card as a bar, the table of shares, and the run's throughput and counters."""
    if not output.for_people:
        return
    from onebudget.report.bar import CardBar
    from onebudget.report.segments import segments_of
    from onebudget.report.tables import ledger_view, run_lines

    view = ledger_view(document, width=output.console().width)
    output.show("", CardBar(segments_of(document)), "", view, *run_lines(document))


def check_report_path(path: Path | None) -> None:
    """Refuse, before any work, a page that could not be written in the end."""
    if path is None:
        return
    check_writable(path, "--report")
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("--report draws with plotly, which is not installed: pip install plotly.", field="--report")


def write_report(document: Mapping[str, Any], path: Path | None, output: Output) -> None:
    """Write the page and say where it is."""
    if path is None:
        return
    from onebudget.report.html import page

    write_text(path, page(document))
    output.show(f"report: {path.absolute()}")
