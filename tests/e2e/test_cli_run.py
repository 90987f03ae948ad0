"""``onebudget run`` with the real engine and the demo model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.demo
RUN = [sys.executable, "-m", "onebudget.cli", "run"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False)


def total(shares: dict[str, Any]) -> int:
    return int(
        sum(term["bytes"] for term in shares["terms"]) + shares["kv_cache"]["bytes"] + shares["unassigned_bytes"]
    )


def test_the_demo_answers_as_recorded_and_its_ledger_sums(demo_model: Path, tmp_path: Path) -> None:
    page, copy = tmp_path / "page.html", tmp_path / "run.json"
    done = run("--json", "--json-file", copy, "--report", page)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["demo"]["equal"] == document["demo"]["of"] == 8
    assert total(document) == document["capacity_bytes"] == document["device"]["total_bytes"]
    assert total(document["measured"]) == document["capacity_bytes"]
    assert [request["finish_reason"] in ("stop", "length") for request in document["requests"]] == [True] * 8
    assert json.loads(copy.read_text()) == document
    assert all(term["name"] in page.read_text() for term in document["terms"])
    explained = subprocess.run(
        [sys.executable, "-m", "onebudget.cli", "explain", str(copy)], capture_output=True, text=True, check=True
    )
    assert f"{document['capacity_bytes']:,} B" in explained.stdout


def test_one_request_too_long_is_refused_and_the_other_answered(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"prompt": [5] * 65}) + "\n" + json.dumps({"prompt": "Hello", "max_tokens": 2}) + "\n"
    )
    done = run(demo_model, "--prompts", prompts, "--max-seq-len", 64, "--max-num-tokens", 64, "--quiet", "--json")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    refused, answered = json.loads(done.stdout)["requests"]
    assert refused["finish_reason"] == "refused"
    assert refused["error"] in done.stderr
    assert len(answered["token_ids"]) == 2


def test_a_card_too_small_is_status_1_with_a_ledger_that_sums(demo_model: Path) -> None:
    done = run(demo_model, "--prompt", "a", "--device-memory", "280MiB", "--json", "--quiet")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    document = json.loads(done.stdout)
    assert not document["fits"]
    assert document["shortfall_bytes"] > 0
    assert total(document) == document["capacity_bytes"] == 280 * 2**20


@pytest.fixture
def heard() -> Iterator[None]:
    """Tests that a shell runs in the background ignore interrupts, and so would whoever they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupt_prints_what_there_is_and_leaves_with_130(demo_model: Path) -> None:
    prompts = [part for number in range(8) for part in ("--prompt", f"Count to {number}")]
    command = [*RUN, str(demo_model), *prompts, "--max-tokens", "500", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("generate"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    document = json.loads(out)
    assert total(document) == document["capacity_bytes"]
    assert "cancelled" in {request["finish_reason"] for request in document["requests"]}
