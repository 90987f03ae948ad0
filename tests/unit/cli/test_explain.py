from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Invoke = Callable[..., Any]


def saved(tmp_path: Path, document: object, name: str = "ledger.json") -> Path:
    file = tmp_path / name
    file.write_text(json.dumps(document))
    return file


def test_one_ledger_is_words_bar_and_table(invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]) -> None:
    result = invoke("explain", saved(tmp_path, run_document))
    assert (result.status, result.err) == (0, "")
    text = " ".join(result.out.split())
    assert "weights takes 40.00 GiB (42,949,672,960 B)" in text
    assert "max_gpu_total_bytes = 12,884,901,888" in text
    assert "[AAAA" in result.out
    assert "85,899,345,920" in result.out


def test_two_ledgers_show_what_changed_and_nothing_else(
    invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]
) -> None:
    before = saved(tmp_path, run_document)
    run_document["terms"][0]["bytes"] -= 1000
    run_document["unassigned_bytes"] += 1000
    result = invoke("explain", before, saved(tmp_path, run_document, "other.json"))
    assert result.status == 0
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()[:1].isalpha()}
    assert rows["weights"][1:4] == ["42,949,672,960", "42,949,671,960", "-1,000"]
    assert rows["unassigned_bytes"][3] == "+1,000"
    assert "activations" not in rows


def test_two_equal_ledgers_say_so(invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]) -> None:
    file = saved(tmp_path, run_document)
    assert "Nothing changed" in invoke("explain", file, file).out


def test_json_is_one_document_and_nothing_else(invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]) -> None:
    file, copy = saved(tmp_path, run_document), tmp_path / "copy.json"
    result = invoke("explain", file, "--json", "--json-file", copy)
    document = json.loads(result.out)
    assert document["ledger"]["capacity_bytes"] == 80 * 2**30
    assert len(document["explanation"]) > 10
    assert json.loads(copy.read_text()) == document
    both = json.loads(invoke("explain", file, file, "--json").out)
    assert both["changes"] == []


def test_the_page_is_written_and_named(invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    result = invoke("explain", saved(tmp_path, run_document), "--report", page)
    assert str(page) in result.out
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema": "onebudget.ledger/2"}', '{"schema": "onebudget.ledger/1"}']
)
@pytest.mark.parametrize("second", [False, True])
def test_a_broken_ledger_is_status_2(
    invoke: Invoke, tmp_path: Path, run_document: dict[str, Any], content: str, second: bool
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(content)
    good = [saved(tmp_path, run_document)] if second else []
    result = invoke("explain", *good, broken)
    assert (result.status, result.out) == (2, "")
    assert "broken.json is not a usable ledger" in result.paragraph


def test_a_missing_ledger_is_status_2(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("explain", tmp_path / "none.json", "--json")
    assert (result.status, result.out) == (2, "")
    assert "No such file" in result.paragraph


@pytest.mark.parametrize("option", ["--json-file", "--report"])
def test_an_output_that_can_not_be_written_is_refused_first(
    invoke: Invoke, tmp_path: Path, run_document: dict[str, Any], option: str
) -> None:
    file = saved(tmp_path, run_document)
    for target in (tmp_path, tmp_path / "none" / "out"):
        result = invoke("explain", file, option, target)
        assert (result.status, result.out) == (2, "")
        assert option in result.paragraph


def test_a_wrong_log_level_is_status_2(invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]) -> None:
    result = invoke("explain", saved(tmp_path, run_document), "--log-level", "loud")
    assert result.status == 2
    assert "debug, info, warning, error, critical" in result.paragraph


@pytest.fixture
def divided(run_document: dict[str, Any]) -> dict[str, Any]:
    """12 GiB of cache cost 40 960 B a token; a workspace of as much a token had 24 GiB to share with it."""
    return {
        **run_document,
        "admission": {"attended_tokens_cap": 314_572},
        "context_workspace": {
            "shared_bytes": 24 << 30, "bytes_per_token": 40_960, "kv_len_cap": 1 << 20, "max_seq_len": 32_768,
            "requests_per_step": 32,
        },
    }  # fmt: skip


def test_a_context_workspace_shows_what_other_caps_would_give(
    invoke: Invoke, tmp_path: Path, divided: dict[str, Any]
) -> None:
    result = invoke("explain", saved(tmp_path, divided), "--report", tmp_path / "page.html")
    assert (result.status, result.err) == (0, "")
    row = next(line.split() for line in result.out.splitlines() if "chosen" in line)
    assert row[:6] == ["314,572", "9", "4", "12.00", "GiB", "314,572"]
    assert 'id="context-cap"' in (tmp_path / "page.html").read_text()
    document = json.loads(invoke("explain", saved(tmp_path, divided), "--json").out)
    assert [point["attended_tokens_cap"] for point in document["context_cap"]][:2] == [32_768, 65_536]
    assert [point["chosen"] for point in document["context_cap"]].count(True) == 1


def test_without_one_nothing_is_said_about_it(invoke: Invoke, tmp_path: Path, run_document: dict[str, Any]) -> None:
    result = invoke("explain", saved(tmp_path, run_document), "--report", tmp_path / "page.html")
    assert "attended" not in result.out
    assert 'id="context-cap"' not in (tmp_path / "page.html").read_text()
    assert "context_cap" not in json.loads(invoke("explain", saved(tmp_path, run_document), "--json").out)
