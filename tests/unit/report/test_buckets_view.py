from __future__ import annotations

import io

from rich.console import Console

from onebudget.planner.bucket_advice import advise_buckets
from onebudget.report.buckets import buckets_view, picture


def text_of(document: dict[str, object], width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*buckets_view(document), sep="\n")
    return console.export_text()


def test_bars_are_in_proportion_and_padding_is_marked() -> None:
    document = advise_buckets({2: 100.0, 3: 100.0}, load="test", allowance_bytes=9 << 20).to_dict()
    assert document["recommended"]["sizes"] == [3]
    (heading, bar) = [line.plain for line in picture(document)]
    assert "padding" in heading
    assert (bar.count("\u2588"), bar.count("\u2591")) == (40, 8)  # 500 rows of requests and 100 of padding in 48 cells


def test_many_sizes_share_rows() -> None:
    document = advise_buckets(dict.fromkeys(range(1, 101), 1.0), load="test", allowance_bytes=10**12).to_dict()
    lines = [line.plain for line in picture(document)]
    assert len(lines) == 1 + 20
    assert lines[1].split()[:3] == ["1", "to", "5"]


def test_no_graph_no_picture() -> None:
    document = advise_buckets({2: 1.0}, load="test", allowance_bytes=0).to_dict()
    assert picture(document) == []
    assert "nothing: no graph fits" in text_of(document)
