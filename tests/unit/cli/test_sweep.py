from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Invoke = Callable[..., Any]
COMMON = ("sweep", "Qwen/Qwen3-8B", "--offline", "--engine", "vllm", "--set", "max_model_len=8192")


def test_a_table_and_a_page(invoke: Invoke, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    given = ("--gpu", "H100-SXM-80GB", "--gpu", "RTX-3050-6GB", "--tp", "1,2", "--price", "h100=2", "--report", page)
    result = invoke(*COMMON, *given)
    assert result.status == 0, result.err
    assert "4 points: 2 fit" in result.out
    assert "does not fit" in result.out
    assert "plans (4)" in result.err
    text = page.read_text()
    assert "What no other point beats" in text
    assert 'id="pareto"' in text


def test_json_is_one_document(invoke: Invoke) -> None:
    result = invoke(*COMMON, "--gpu", "H100-SXM-80GB", "--kv-dtype", "auto,fp8", "--json", "-q")
    assert (result.status, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["schema"] == "onebudget.sweep/1"
    plain, halved = (row["kv_tokens"] for row in document["rows"])
    assert halved == pytest.approx(2 * plain, rel=0.001)


def test_nothing_fits(invoke: Invoke) -> None:
    assert invoke(*COMMON, "--gpu", "RTX-3050-6GB", "-q").status == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--gpu", "H1000"), "Did you mean"),
        (("--gpu", "H100-SXM-80GB", "--tp", "1,two"), "--tp"),
        (("--gpu", "H100-SXM-80GB", "--price", "h100=cheap"), "--price"),
        (("--gpu", "H100-SXM-80GB", "--set", "max_model_length=1"), "did you mean max_model_len"),
        (("--gpu", "custom", "--gpu-total", "lots"), "--gpu-total"),
    ],
)
def test_refusals_are_a_paragraph(invoke: Invoke, given: tuple[str, ...], words: str) -> None:
    result = invoke(*COMMON, *given, "-q")
    assert result.status == 2
    assert words in result.paragraph
