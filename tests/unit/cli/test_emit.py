from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onebudget.planner.policies import policy_for
from onebudget.planner.request import make_request, request_document

Invoke = Callable[..., Any]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    settings = {"max_tokens": 4096, "max_batch_size": 8}
    request = make_request("Qwen/Qwen3-8B", "H100-SXM-80GB", engine="trtllm", settings=settings, offline=True)
    document = policy_for("trtllm").plan(request).to_dict() | {"request": request_document("trtllm", request)}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    return path


def test_a_command_and_its_file(invoke: Invoke, plan: Path, tmp_path: Path) -> None:
    result = invoke("emit", plan)
    assert result.status == 0
    assert result.out.startswith("trtllm-serve Qwen/Qwen3-8B")
    assert "max_tokens: 4096" in result.out
    options = tmp_path / "extra.yaml"
    written = json.loads(invoke("emit", plan, "--options-file", options, "--json").out)
    assert str(options) in written["words"]
    assert "max_tokens: 4096" in options.read_text()


def test_refusals_are_a_paragraph(invoke: Invoke, plan: Path, tmp_path: Path) -> None:
    assert invoke("emit", plan, "--for", "vlm").status == 2
    assert "Did you mean vllm" in invoke("emit", plan, "--for", "vlm").paragraph
    document = json.loads(plan.read_text()) | {"fits": False, "shortfall_bytes": 2**30}
    plan.write_text(json.dumps(document))
    result = invoke("emit", plan)
    assert (result.status, "1.00 GiB are missing" in result.paragraph) == (1, True)
