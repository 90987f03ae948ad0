"""The card as one line of text: a stacked bar, coloured where the terminal can, lettered where it can't."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onebudget.report.palette import colour_of
from onebudget.report.segments import Segment
from onebudget.units import format_bytes

_LETTERS = string.ascii_uppercase + string.ascii_lowercase


def cell_widths(sizes: Sequence[int], cells: int) -> list[int]:
    """Share ``cells`` among ``sizes`` in proportion; every size above 0 gets at least one cell.

    Uses largest remainders, so the widths add up to ``cells`` as long as there are as many cells as shares.
    """
    total = sum(sizes)
    if total <= 0:
        return [0] * len(sizes)
    widths = [max(size * cells // total, 1) if size else 0 for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda at: size_remainder(sizes[at], cells, total), reverse=True)
    for at in by_remainder[: max(cells - sum(widths), 0)]:
        widths[at] += 1 if sizes[at] else 0
    while sum(widths) > cells and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def size_remainder(size: int, cells: int, total: int) -> int:
    """What rounding down takes from a share, in units of ``1 / total`` cells; negative for one rounded up to a cell."""
    return size * cells % total if size * cells >= total else -1


@dataclass(frozen=True, slots=True)
class CardBar:
    """A rich renderable: the bar as wide as the console, and its legend below."""

    segments: Sequence[Segment]
    measured: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [(letter, segment, size) for letter, (segment, size) in zip(_LETTERS, self._sizes(), strict=False)]
        widths = cell_widths([size for _, _, size in shown], max(options.max_width - 2, 10))
        coloured = console.color_system in ("256", "truecolor")  # in 16 colours neighbours would look alike
        bar, legend = Text("[", no_wrap=True), []
        for (letter, segment, size), width in zip(shown, widths, strict=True):
            mark = "\u2588" if coloured else letter
            bar.append(mark * width, style=colour_of(segment.name))
            legend.append(Text.assemble((mark, colour_of(segment.name)), f" {segment.name} {format_bytes(size)}"))
        yield bar.append("]")
        yield Columns(legend, padding=(0, 2))

    def _sizes(self) -> list[tuple[Segment, int]]:
        sizes = ((s, (s.measured_bytes or 0) if self.measured else s.planned_bytes) for s in self.segments)
        return [(segment, size) for segment, size in sizes if size > 0]
