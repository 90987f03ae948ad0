from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Invoke = Callable[..., Any]
STEPS = ("--weights", "16GB", "--kv-bytes-per-token", 131072, "--bandwidth", "3352GB", "--tflops", 989)


@pytest.fixture
def load(tmp_path: Path) -> Path:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"3": 100, "5": 50, "30": 20, "60": 1}))
    return path


def test_a_histogram_in_json(invoke: Invoke, load: Path) -> None:
    result = invoke("buckets", "--histogram", load, "--allowance", "3MiB", "--bytes-per-bucket", "1MiB", "--json")
    assert (result.status, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["recommended"] == {
        "name": "recommended", "sizes": [5, 30, 60], "graph_bytes": 3 << 20, "hit_rate": 1.0, "padded_tokens": 200,
        "padded_share": round(200 / 1410, 6),
    }  # fmt: skip
    assert document["max_batch_size"] == 60
    assert document["flags"]["SGLang"] == "--cuda-graph-bs 5 30 60"


def test_words_for_people(invoke: Invoke, load: Path) -> None:
    result = invoke("buckets", "--histogram", load, "--allowance", "40MiB")
    assert result.status == 0
    for words in (
        "capture 3, 5, 30, 60",
        "modelled: 8 MiB",
        "TensorRT-LLM +64",
        "fewer padded rows",
        "cudagraph_capture",
    ):
        assert words in result.out


def test_a_trace_is_served_first(invoke: Invoke, tmp_path: Path) -> None:
    rows = [{"timestamp": number, "input_length": 600, "output_length": 40} for number in range(12)]
    trace = tmp_path / "requests.jsonl"
    trace.write_text(
        "".join(json.dumps({**row, "hash_ids": [row["timestamp"], 100 + row["timestamp"]]}) + "\n" for row in rows)
    )
    result = invoke("buckets", trace, "--kv-blocks", 2000, *STEPS, "--rate", 2, "--json", "-q")
    assert result.status == 0
    document = json.loads(result.out)
    assert document["load"].endswith("at 2 times its rate")
    assert document["max_batch_size"] == 256
    assert set(document["recommended"]["sizes"]) <= set(map(int, document["histogram"]))


def test_a_ledger_brings_the_allowance(
    invoke: Invoke, load: Path, tmp_path: Path, run_document: dict[str, Any]
) -> None:
    freed = 40 << 20
    run_document["unassigned_bytes"] -= freed
    run_document["terms"] = [term for term in run_document["terms"] if term["name"] != "graphs"]
    had = run_document["capacity_bytes"] - run_document["kv_cache"]["bytes"] - run_document["unassigned_bytes"]
    missing = had - sum(term["bytes"] for term in run_document["terms"])
    graphs = {**run_document["terms"][0], "name": "graphs", "owner": "graphs", "bytes": missing}
    for bound in ("low_bytes", "high_bytes"):
        graphs[bound] = missing
    run_document["terms"].append(graphs)
    ledger = tmp_path / "ledger.json"
    ledger.write_text(json.dumps(run_document))
    document = json.loads(invoke("buckets", "--histogram", load, "--plan", ledger, "--json").out)
    assert (document["allowance_bytes"], document["allowance_basis"]) == (missing, "the ledger's graphs")
    assert "the ledger's" in document["bytes_per_bucket"]["basis"]


def test_nothing_fits_is_a_no(invoke: Invoke, load: Path) -> None:
    result = invoke("buckets", "--histogram", load, "--allowance", "1MiB", "--json")
    assert result.status == 1
    assert json.loads(result.out)["recommended"]["sizes"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one load"),
        (("trace.csv", "--histogram", "load.json"), "one load"),
        (("--histogram", "none.json"), "can't be read"),
        (("--histogram", "load.json", "--allowance", "much"), "--allowance"),
        (("--histogram", "load.json", "--bytes-per-bucket", "0"), "--bytes-per-bucket"),
    ],
)
def test_unusable_input(
    invoke: Invoke, load: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(load.parent)
    result = invoke("buckets", *arguments)
    assert result.status == 2
    assert words in result.paragraph
