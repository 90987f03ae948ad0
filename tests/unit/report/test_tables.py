from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from onebudget.report.tables import Columns, change_sentence, ledger_view, run_lines, signed


def rendered(document: dict[str, Any], width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(ledger_view(document, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_every_exact_figure_and_the_total_stand_in_the_table(run_document: dict[str, Any], width: int) -> None:
    text = rendered(run_document, width)
    figures = [term["bytes"] for term in run_document["terms"]] + [
        term["bytes"] for term in run_document["measured"]["terms"]
    ]
    figures += [run_document["kv_cache"]["bytes"], run_document["unassigned_bytes"], run_document["capacity_bytes"]]
    assert [figure for figure in figures if f"{figure:,}" not in text] == []
    total = next(line for line in text.splitlines() if line.strip().startswith("total"))
    assert total.count("85,899,345,920") == 2


def test_the_columns_of_the_table_sum_to_its_total_row(run_document: dict[str, Any]) -> None:
    lines = rendered(run_document, 80).splitlines()
    rows = [line.split() for line in lines if line.strip().startswith("\u25a0")]
    planned, measured, difference = (sum(int(row[at].replace(",", "")) for row in rows) for at in (2, 3, 4))
    assert (planned, measured, difference) == (80 * 2**30, 80 * 2**30, 0)


@pytest.mark.parametrize("width", [80, 140])
def test_reasons_are_there_at_every_width(run_document: dict[str, Any], width: int) -> None:
    text = " ".join(rendered(run_document, width).split())
    assert "max(0, output budget - encoder output)" in text
    assert "declared" in text


def test_the_binding_cap_is_the_marked_one(plan_document: dict[str, Any]) -> None:
    marked = [line for line in rendered(plan_document, 100).splitlines() if line.rstrip().endswith("binding")]
    assert len(marked) == 1
    assert marked[0].split()[0] == "max_gpu_total_bytes"


def test_warnings_and_notes_are_printed_as_they_are(plan_document: dict[str, Any]) -> None:
    plan_document["notes"] = ["a [bold]bracket[/bold]"]
    plan_document["terms"][0]["why"] = "[red]3[/red] tensors"
    text = rendered(plan_document, 140)
    assert "warning: bucket 64 was not seen by the probe" in text
    assert "note: a [bold]bracket[/bold]" in text
    assert "[red]3[/red] tensors" in text


def test_a_budget_that_does_not_fit_says_so_with_the_ways_out(plan_document: dict[str, Any]) -> None:
    plan_document |= {"fits": False, "shortfall_bytes": 3 * 2**20}
    plan_document["changes"] = [{"set": {"max_seq_len": 512}, "gains_bytes": 2**22, "fits": True}]
    text = rendered(plan_document, 140)
    assert "does not fit, short of 3.00 MiB" in text
    assert "set max_seq_len = 512: gains 4.00 MiB, then it fits" in text


def test_columns_make_room_for_exact_bytes_first() -> None:
    def shown(width: int, measured: bool) -> list[str]:
        return [name for name, there in asdict(Columns.for_width(width, measured=measured)).items() if there]

    assert shown(80, measured=True) == ["measured"]
    assert shown(80, measured=False) == ["human", "owner"]
    assert shown(112, measured=True) == ["measured", "human", "owner"]
    assert shown(140, measured=True) == ["measured", "peak", "human", "owner"]
    assert shown(160, measured=True) == ["measured", "peak", "human", "owner", "why"]


def test_peak_use_stands_beside_what_is_held(run_document: dict[str, Any]) -> None:
    run_document["measured"]["terms"][0]["peak_bytes"] = 123_456_789
    run_document["measured"]["kv_cache"]["peak_bytes"] = 987_654_321
    text = rendered(run_document, 140)
    assert "123,456,789" in text
    assert "987,654,321" in text


def test_small_sentences() -> None:
    assert [signed(number) for number in (1024, 0, -5)] == ["+1,024", "0", "-5"]
    change = {"set": {"dtype": "bf16", "max_batch_size": 4}, "gains_bytes": 0, "fits": False}
    assert change_sentence(change) == "set dtype = bf16, max_batch_size = 4: gains 0 B, not enough by itself"


def test_run_lines_hold_throughput_and_counters(run_document: dict[str, Any]) -> None:
    throughput, counters = run_lines(run_document)
    assert throughput == "throughput: prompt tokens 300, output tokens 120, seconds 4.21, output tokens per s 28.50"
    assert counters.startswith("counters: steps 48, deferred 0")
    assert run_lines({}) == []
