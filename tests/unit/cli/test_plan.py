"""``onebudget plan``: exit statuses, one JSON document, one paragraph for wrong input, tables for people, a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onebudget.budget.ledger import Ledger

Invoke = Callable[..., Any]
MODEL, QUICK = "Qwen/Qwen2.5-7B-Instruct", ("--quick", "--offline", "--quiet")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path / "cache"))


def test_a_plan_as_tables(invoke: Invoke) -> None:
    done = invoke("plan", MODEL, "--gpu", "L4", *QUICK)
    assert done.status == 0
    for said in ("on L4", "kv_cache", "The longest request that could be served", "free_gpu_memory_fraction"):
        assert said in done.out


def test_a_plan_as_one_document(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = invoke("plan", MODEL, "--gpu", "L4", "--json", "--json-file", file, *QUICK)
    document = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    assert json.loads(file.read_text()) == document
    assert Ledger.from_dict(document).fits
    assert document["request"]["gpu"].startswith("L4")


@pytest.mark.parametrize("engine", ["onebudget", "vllm", "sglang", "trtllm", "llamacpp"])
def test_what_does_not_fit_is_exit_status_1_with_ways_out(invoke: Invoke, engine: str) -> None:
    alone = ("--set", "fit=off") if engine == "llamacpp" else ()  # with it, layers stay on the host
    done = invoke("plan", "Qwen/Qwen3-32B", "--gpu", "L4", "--engine", engine, "--json", *alone, *QUICK)
    document = json.loads(done.out)
    assert done.status == 1
    assert not document["fits"]
    assert document["shortfall_bytes"] > 0
    assert all(change["fits"] for change in document["changes"])
    assert document["changes"]


def test_a_missed_target_is_exit_status_1(invoke: Invoke) -> None:
    asked = ("plan", MODEL, "--gpu", "L4", "--engine", "vllm", "--target-seq-len", "8192", *QUICK)
    assert invoke(*asked).status == 0
    missed = invoke(*asked, "--target-concurrency", "100")
    assert missed.status == 1
    assert "does not reach its target" in missed.out


def test_knobs_and_settings_reach_the_engine(invoke: Invoke) -> None:
    done = invoke("plan", MODEL, "--gpu", "L4", "--max-batch-size", 3, "--set", "tokens_per_block=16", "--json", *QUICK)
    document = json.loads(done.out)
    assert document["kv_cache"]["tokens_per_block"] == 16
    assert document["answers"]["largest_concurrency"] <= 3


def test_a_serving_command_is_a_plan(invoke: Invoke) -> None:
    line = f"vllm serve {MODEL} --max-model-len 4096 --gpu-memory-utilization 0.8 --tensor-parallel-size 2"
    document = json.loads(invoke("plan", "--from-flags", line, "--gpu", "L4x2", "--json", *QUICK).out)
    assert (document["engine"], document["request"]["layout"]["tp"]) == ("vllm", 2)
    assert document["caps"][0]["value"] == 0.8
    assert document["answers"]["max_seq_len"] == 4096


def test_a_plan_for_this_machine(invoke: Invoke) -> None:
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    document = json.loads(invoke("plan", model, "--gpu", "host", "--gpu-total", "1GiB", "--json", *QUICK).out)
    assert document["capacity_bytes"] == 2**30
    assert document["request"]["gpu"] == "host"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((MODEL,), "Which card?"),
        (("--gpu", "L4"), "Which model?"),
        ((MODEL, "--gpu", "L44"), "Did you mean"),
        ((MODEL, "--gpu", "L4", "--set", "x"), "KEY=VALUE"),
        ((MODEL, "--gpu", "L4", "--engine", "vllm", "--set", "max_modl_len=3"), "did you mean max_model_len"),
        ((MODEL, "--gpu", "L4", "--engine", "vllm", "--max-seq-len", "3"), "by its own names"),
        ((MODEL, "--gpu", "L4", "--use", "both"), "server or offline"),
        ((MODEL, "--gpu", "L4x3"), "tp = 3 does not divide"),
        ((MODEL, "--gpu", "L4", "--from-flags", "vllm serve other/model"), "which one?"),
        (("--gpu", "L4", "--from-flags", "vllm serve a/b --max-modl-len 3"), "--max-model-len"),
        ((MODEL, "--gpu", "L4", "--gpu-totl", "3GiB"), "--gpu-total"),
        (("nobody/knows", "--gpu", "L4"), "No model is known"),
        (("./nowhere", "--gpu", "L4"), "does not exist"),
    ],
)
def test_wrong_input_is_one_paragraph_and_exit_status_2(invoke: Invoke, arguments: tuple[str, ...], says: str) -> None:
    done = invoke("plan", *arguments, *QUICK)
    assert done.status == 2
    assert says in done.paragraph


def test_a_plan_as_a_page(invoke: Invoke, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    done = invoke("plan", MODEL, "--gpu", "L4x2", "--engine", "vllm", "--report", page, *QUICK)
    assert done.status == 0
    text = page.read_text()
    assert "What it is good for" in text
    assert "The longest request that could be served" in text


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_ranks_that_do_not_divide_the_heads_are_exit_status_2(invoke: Invoke, engine: str) -> None:
    done = invoke("plan", MODEL, "--gpu", "L4", "--engine", engine, "--tp", 3, *QUICK)
    assert done.status == 2
    assert "tp = 3 does not divide the 28 attention" in done.paragraph
