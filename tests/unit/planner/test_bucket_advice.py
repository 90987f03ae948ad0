from __future__ import annotations

import json
from pathlib import Path

import pytest

from onebudget.budget.ledger import Ledger, Term
from onebudget.errors import ConfigError
from onebudget.graphs.buckets import default_graph_batch_sizes
from onebudget.planner.bucket_advice import (
    MODELLED,
    advise_buckets,
    cost_of_ledger,
    engine_flags,
    equal_cost,
    read_histogram,
)
from onebudget.units import KIB, MIB

LOAD = {3: 100.0, 5: 50.0, 30: 20.0, 60: 1.0}


def test_the_stated_model() -> None:
    assert MODELLED(256) == 8 * MIB + 256 * 20 * KIB
    assert MODELLED.of_list([1, 2]) == 16 * MIB + 60 * KIB


def test_every_size_of_a_load_where_memory_allows() -> None:
    advice = advise_buckets(LOAD, load="test", max_batch_size=64, allowance_bytes=10**9)
    best = advice.recommended
    assert (best.sizes, best.padded_tokens, best.padded_share, best.hit_rate) == ((3, 5, 30, 60), 0, 0, 1)
    assert best.graph_bytes == MODELLED.of_list([3, 5, 30, 60])
    assert "more than 60 requests" in advice.notes[0]


def test_defaults_beside_the_best_list_within_their_bytes() -> None:
    advice = advise_buckets(LOAD, load="test", max_batch_size=64, cost=equal_cost(MIB, "given"))
    names = [row.default.name for row in advice.comparisons]
    assert names == ["TensorRT-LLM +64", "TensorRT-LLM x2", "vLLM", "SGLang"]
    assert advice.allowance_bytes == len(default_graph_batch_sizes(64)) * MIB
    trtllm = advice.comparisons[0]
    assert trtllm.default.padded_tokens == 100 * 1 + 50 * 3 + 20 * 2 + 1 * 4
    assert trtllm.default.padded_share == 294 / (300 + 250 + 600 + 60 + 294)
    assert (trtllm.planned.padded_tokens, trtllm.fewer_share, trtllm.judged) == (0, 1, True)


def test_a_default_that_hardly_wastes_is_not_judged() -> None:
    advice = advise_buckets({64: 1000.0, 63: 1.0}, load="test", max_batch_size=64)
    assert not any(row.judged for row in advice.comparisons)
    assert all(row.planned.padded_tokens == 0 for row in advice.comparisons)


def test_the_document_is_plain_json() -> None:
    document = advise_buckets(LOAD, load="test").to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["schema"] == "onebudget.buckets/1"
    assert (document["max_batch_size"], document["histogram"]["3"]) == (60, 100.0)


def test_flags_hold_the_list() -> None:
    assert engine_flags([1, 4]) == {
        "TensorRT-LLM": "cuda_graph_config: {enable_padding: true, batch_sizes: [1,4]}",
        "vLLM": "--compilation-config '{\"cudagraph_capture_sizes\": [1,4]}'",
        "SGLang": "--cuda-graph-bs 1 4",
        "onebudget": "--cuda-graph-batch-sizes 1,4",
    }


def ledger_of(engine: str, graphs: int) -> Ledger:
    terms = (Term("graphs", "graphs", graphs),) if graphs else ()
    return Ledger(capacity_bytes=1000 * MIB, terms=terms, unassigned_bytes=1000 * MIB - graphs, engine=engine)


def test_a_ledger_tells_what_a_graph_takes() -> None:
    cost = cost_of_ledger(ledger_of("vllm", 350 * MIB), 256)
    assert cost is not None and cost(1) == cost(256) == 10 * MIB
    assert "35 of vLLM" in cost.basis
    ours = cost_of_ledger(ledger_of("onebudget", 21 * MIB), 256)
    assert ours is not None and ours(9) == MIB
    assert cost_of_ledger(ledger_of("onebudget", 0), 256) is None


@pytest.mark.parametrize("histogram", [{}, {4: 0.0}])
def test_no_load_is_refused(histogram: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="histogram"):
        advise_buckets(histogram, load="test")


@pytest.mark.parametrize(
    "text",
    [
        '{"8": 120, "3": 0.5}',
        '{"schema": "x", "batch_size_histogram": {"8": 120, "3": 0.5}}',
        '{"histogram": {"3": 0.5, "8": 120}}',
        "8,120\n3,0.5\n",
        "batch,steps\n8, 100\n3,0.5\n\n8,20\n",
    ],
)
def test_files_of_every_form(tmp_path: Path, text: str) -> None:
    path = tmp_path / "load"
    path.write_text(text)
    assert read_histogram(path) == {8: 120, 3: 0.5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no batch size"),
        ("{", "JSON is broken"),
        ('{"histogram": [1]}', "no JSON object"),
        ('{"zero": 1}', "key 'zero'"),
        ('{"0": 1}', "key '0'"),
        ('{"4": -1}', "no weight"),
        ('{"4": true}', "no weight"),
        ('{"4": NaN}', "no weight"),
        ("4,1\n5\n", "line 2"),
        ("4,1\nfive,2\n", "line 2"),
        ("4,1,9\n", "line 1"),
    ],
)
def test_unusable_files_are_told_with_their_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "load"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_histogram(path)
    assert caught.value.field == "--histogram"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_histogram(tmp_path / "none")


def test_bytes_of_a_graph_are_positive() -> None:
    with pytest.raises(ConfigError, match="bytes-per-bucket"):
        equal_cost(0, "given")
