"""The live ledger: planned lines beside what they became."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, SamplingParams
from onebudget.budget.ledger import KVCacheLine, Ledger, Term
from onebudget.config import BudgetConfig
from onebudget.devtools.scripted import scripted_executor
from onebudget.engine.memory_report import compared
from onebudget.errors import StateError

KNOBS: dict[str, Any] = {
    "dtype": "fp32", "device_memory": "16MiB", "max_seq_len": 64, "max_num_tokens": 32, "tokens_per_block": 8,
}  # fmt: skip


def line(name: str, report: dict[str, Any]) -> dict[str, Any]:
    return next(line for line in report["lines"] if line["name"] == name)


def test_every_line_of_the_ledger_has_its_current_value(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("gqa"), **KNOBS, strict_memory=True) as llm:
        before = llm.memory_report()
        llm.generate(["a", "b"], SamplingParams(max_tokens=4, temperature=0, repetition_penalty=1.2))
        report = llm.memory_report()
        assert llm.engine.executor.memory_report() == report
        names = [entry["name"] for entry in report["lines"]]
        assert len(set(names)) == len(names)
        assert {*(term.name for term in llm.budget.terms), "kv_cache"} <= set(names)
        assert line("weights", report)["delta_bytes"] == 0
        assert not [entry for entry in report["lines"] if entry["flag"] == "over"]
        penalties = line("penalty_workspace", report)
        assert line("penalty_workspace", before)["bytes"] == 0
        assert 0 < penalties["bytes"] <= penalties["planned_bytes"]
        assert line("kv_cache", report)["bytes"] == report["kv_cache"]["bytes"]
        assert [group["window_tokens"] for group in report["kv_groups"]] == [None]
        assert (
            report["kv_groups"][0]["used_blocks"] + report["kv_groups"][0]["free_blocks"]
            == report["kv_groups"][0]["blocks"]
        )
        assert report["counters"]["steps"] > before["counters"]["steps"]
        assert (report["error_budget"], report["stopped"]) == (1.0, None)


@pytest.mark.parametrize(
    ("peak", "basis", "flag"),
    [
        (105, "exact", None), (106, "exact", "over"), (95, "exact", None), (94, "exact", "under"),
        (94, "measured", "under"), (10, "declared", None), (106, "declared", "over"),
    ],
)  # fmt: skip
def test_more_than_five_per_cent_is_flagged(peak: int, basis: Any, flag: str | None) -> None:
    ledger = Ledger(capacity_bytes=300, terms=(Term("weights", "models", 100, basis),), kv_cache=KVCacheLine(bytes=200))
    report = {"terms": [{"name": "weights", "bytes": 7, "peak_bytes": peak}], "kv_cache": {"bytes": 200}}
    assert compared(ledger, report) == [
        {
            "name": "weights",
            "planned_bytes": 100,
            "bytes": 7,
            "peak_bytes": peak,
            "delta_bytes": peak - 100,
            "flag": flag,
        },
        {"name": "kv_cache", "planned_bytes": 200, "bytes": 200, "peak_bytes": 200, "delta_bytes": 0, "flag": None},
    ]


def test_what_nobody_planned_is_over() -> None:
    ledger = Ledger(capacity_bytes=200, terms=(), kv_cache=KVCacheLine(bytes=200))
    report = {"terms": [{"name": "graphs", "bytes": 5, "peak_bytes": 5}], "kv_cache": {"bytes": 200}}
    assert compared(ledger, report)[0]["flag"] == "over"


def test_an_executor_on_its_own_has_no_ledger() -> None:
    with pytest.raises(StateError, match="no ledger"):
        scripted_executor(BudgetConfig(max_seq_len=8), 4).memory_report()
