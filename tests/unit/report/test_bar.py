from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from onebudget.report.bar import CardBar, cell_widths
from onebudget.report.segments import segments_of


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(20, 300))
def test_widths_fill_the_line_and_hide_nothing(sizes: list[int], cells: int) -> None:
    widths = cell_widths(sizes, cells)
    assert sum(widths) == (cells if sum(sizes) else 0)
    assert all((width >= 1) == (size > 0) for width, size in zip(widths, sizes, strict=True))


def test_widths_are_in_proportion() -> None:
    assert cell_widths([40, 8, 6, 26], 80) == [40, 8, 6, 26]
    assert cell_widths([1, 1, 1], 10) == [4, 3, 3]
    assert cell_widths([10**12, 1], 10) == [9, 1]


def bar_text(document: dict[str, Any], *, measured: bool = False, **console: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=100, **console).print(CardBar(segments_of(document), measured=measured))
    return out.getvalue()


def test_without_colours_the_bar_is_lettered_and_as_wide_as_the_console(run_document: dict[str, Any]) -> None:
    bar, *legend = bar_text(run_document).splitlines()
    assert len(bar) == 100
    assert bar[1:-1].count("A") == round(98 / 2)
    assert "A weights 40.00 GiB" in " ".join(legend)


def test_few_colours_keep_the_letters(run_document: dict[str, Any]) -> None:
    text = bar_text(run_document, force_terminal=True, color_system="standard")
    assert "AAA" in text
    assert "\u2588" not in text


def test_with_colours_the_bar_is_solid(run_document: dict[str, Any]) -> None:
    text = bar_text(run_document, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in text
    assert text.splitlines()[0].count("\u2588") == 98


@pytest.mark.parametrize(("measured", "size"), [(False, "8.00 GiB"), (True, "7.25 GiB")])
def test_the_bar_shows_the_side_it_was_asked_for(run_document: dict[str, Any], measured: bool, size: str) -> None:
    assert f"activations {size}" in bar_text(run_document, measured=measured)
