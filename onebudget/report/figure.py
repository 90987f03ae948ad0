"""The card as a still picture, SVG or PNG: ``python -m onebudget.report.figure LEDGER.json OUT.svg``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError, OneBudgetError
from onebudget.report.document import read_document
from onebudget.report.palette import colour_of, ink_on
from onebudget.report.segments import Document, Segment, has_measurement, segments_of, subject
from onebudget.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
_LABEL_FROM_SHARE = 0.07
_WIDTH_INCHES = 10.0


def write_figure(document: Document, path: Path) -> None:
    """Draw the ledger into ``path``; its suffix decides the format. ``ConfigError`` for another suffix."""
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise ConfigError.for_field(
            "output file", str(path), f"a name ending in {', '.join('.' + name for name in FORMATS)}"
        )
    dates_off = {"Date": None} if suffix == "svg" else {}
    draw(document).savefig(path, dpi=160, metadata=dates_off, facecolor="white")


def draw(document: Document) -> Figure:
    """The stacked bar of the card, planned above measured, with every share's bytes in the legend."""
    from matplotlib.figure import Figure

    segments = [segment for segment in segments_of(document) if segment.planned_bytes or segment.measured_bytes]
    measured = has_measurement(document)
    legend_rows = ceil_div(len(segments), 3)
    height = 1.25 + (1.3 if measured else 0.75) + 0.26 * legend_rows
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    _stack(axes, segments, 0, [segment.planned_bytes for segment in segments])
    if measured:
        _stack(axes, segments, 1, [segment.measured_bytes or 0 for segment in segments])
    _dress(axes, document, measured=measured)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, segments: Sequence[Segment], row: int, sizes: Sequence[int]) -> None:
    start, total = 0, sum(sizes)
    for segment, size in zip(segments, sizes, strict=True):
        colour = colour_of(segment.name)
        label = _label(segment) if row == 0 else None
        axes.barh(row, size, left=start, height=0.66, color=colour, edgecolor="white", linewidth=0.8, label=label)
        if size >= total * _LABEL_FROM_SHARE:
            name = segment.name.replace("_", "\n" if size < total * 2 * _LABEL_FROM_SHARE else " ")
            axes.text(start + size / 2, row, name, ha="center", va="center", color=ink_on(colour), fontsize=9)
        start += size


def _label(segment: Segment) -> str:
    """What the legend says: the planned size, or the measured one of a share that was not planned."""
    if segment.planned_bytes:
        return f"{segment.name}  {format_bytes(segment.planned_bytes)}"
    return f"{segment.name}  {format_bytes(segment.measured_bytes or 0)} measured"


def _dress(axes: Axes, document: Document, *, measured: bool) -> None:
    capacity = int(document["capacity_bytes"])
    marks = [capacity * quarter // 4 for quarter in range(5)]
    axes.set_title(f"{subject(document)}: {format_bytes(capacity)}", loc="left", fontsize=11)
    axes.set_yticks([0, 1] if measured else [0], ["planned", "measured"] if measured else ["planned"])
    axes.set_xticks(marks, [format_bytes(mark).replace(".00", "") if mark else "0" for mark in marks])
    axes.set_xlim(0, capacity)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> int:
    """``LEDGER.json OUT.svg``; exit status 2 with one paragraph when either can't be used."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2:
        print("usage: python -m onebudget.report.figure LEDGER.json OUT.svg", file=sys.stderr)
        return 2
    source, target = map(Path, given)
    try:
        write_figure(read_document(source), target)
    except OneBudgetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {target} can't be written: {error.strerror or error}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
