from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Invoke = Callable[..., Any]
STEPS = ("--weights", "16GB", "--kv-bytes-per-token", 131072, "--bandwidth", "3352GB", "--tflops", 989)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 100 * number, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 2 + number]}
        for number in range(5)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_numbers_in_json_and_nothing_else(invoke: Invoke, trace: Path) -> None:
    result = invoke("simulate", trace, "--kv-blocks", 200, *STEPS, "--json", "--quiet")
    assert (result.status, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["schema"] == "onebudget.simulation/1"
    assert document["requests"] == {"submitted": 5, "finished": 5, "refused": 0, "failed": 0}
    assert document["kv"]["reused_tokens"] == 4 * 1024
    assert document["clock"]["weight_bytes"] == 16_000_000_000
    assert set(document["batch_size_histogram"]) <= {"1", "2", "3", "4", "5"}
    assert len(document["notes"]) == 3


def test_words_for_people_and_progress_beside_them(invoke: Invoke, trace: Path) -> None:
    result = invoke("simulate", trace, "--kv-blocks", 200, *STEPS)
    assert result.status == 0
    for words in ("5 finished", "74.47% of prompt tokens found", "time to first token", "decode batch", "2 per weight"):
        assert words in result.out
    assert "requests (5)" in result.err


def test_a_ledger_brings_pool_weights_and_cap(
    invoke: Invoke, trace: Path, tmp_path: Path, run_document: dict[str, Any]
) -> None:
    ledger = tmp_path / "ledger.json"
    ledger.write_text(json.dumps(run_document))
    times = tmp_path / "times.csv"
    times.write_text("tokens,seconds\n1,0.01\n")
    common = ("simulate", trace, "--plan", ledger, "--step-times", times, "--json", "-q")
    document = json.loads(invoke(*common).out)
    assert document["kv"]["blocks"] == 9830
    assert document["clock"]["kind"] == "table"
    halved = json.loads(invoke(*common, "--tokens-per-block", 64).out)
    assert halved["kv"]["blocks"] == 314_572 // 64
    assert json.loads(invoke(*common, "--kv-blocks", 70).out)["kv"]["blocks"] == 70


def test_a_model_and_a_card_of_the_catalogue_time_the_steps(invoke: Invoke, trace: Path) -> None:
    model = ("--model", "meta-llama/Llama-3.1-8B", "--offline", "--gpu", "h100 sxm 80gb")
    common = ("simulate", trace, "--kv-blocks", 200, *model, "--json", "-q")
    clock = json.loads(invoke(*common).out)["clock"]
    assert clock["gpu"] == "H100-SXM-80GB"
    assert clock["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert clock["bandwidth_bytes_per_s"] == 3352 * 10**9
    other = json.loads(invoke(*common, "--bandwidth", "1000GB").out)["clock"]
    assert other == {**clock, "bandwidth_bytes_per_s": 10**12}


def test_a_model_and_a_card_alone_are_planned_first(invoke: Invoke, trace: Path) -> None:
    model = ("llama-3.1-8b", "--gpu", "L40S-48GB", "--max-seq-len", 8192, "--offline", "--json", "-q")
    planned = json.loads(invoke("plan", *model).out)["kv_cache"]
    served = json.loads(invoke("simulate", trace, "--model", *model).out)["kv"]
    assert served["blocks"] == planned["blocks"] > 0


def test_an_unknown_card_needs_its_rates(invoke: Invoke, trace: Path) -> None:
    common = ("simulate", trace, "--kv-blocks", 200, "--gpu", "Abacus 3000", "-q")
    assert "No card is called 'Abacus 3000'" in invoke(*common).paragraph
    assert invoke(*common, *STEPS).status == 0


def test_knobs_limit_and_rate_reach_the_simulation(invoke: Invoke, trace: Path) -> None:
    common = ("simulate", trace, "--kv-blocks", 200, *STEPS, "--json", "-q", "--limit", 3)
    document = json.loads(
        invoke(
            *common,
            "--rate",
            2,
            "--no-enable-block-reuse",
            "--scheduler-policy",
            "max_utilization",
            "--max-batch-size",
            1,
        ).out
    )
    assert document["requests"]["submitted"] == 3
    assert document["kv"]["hit_rate"] == 0
    assert document["settings"]["scheduler_policy"] == "max_utilization"
    assert set(document["batch_size_histogram"]) == {"1"}


def test_refused_requests_make_the_answer_no(invoke: Invoke, trace: Path) -> None:
    result = invoke("simulate", trace, "--kv-blocks", 30, *STEPS, "-q")
    assert result.status == 1
    assert "5 refused" in result.out


def test_a_synthetic_trace_needs_no_file(invoke: Invoke) -> None:
    common = ("simulate", "synthetic", "--limit", 20, "--kv-blocks", 5000, *STEPS, "--json", "-q")
    first, again, other = (json.loads(invoke(*common, *more).out) for more in ((), (), ("--seed", 1)))
    assert first == again != other
    assert first["requests"]["finished"] == 20


def test_the_page_stands_alone(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    result = invoke("simulate", trace, "--kv-blocks", 200, *STEPS, "--report", page, "-q")
    assert str(page) in result.out
    text = page.read_text(encoding="utf-8")
    for words in (
        'id="timeline"',
        'id="histogram"',
        "74.47% of prompt tokens found",
        "step_overhead_s",
        "max_batch_size",
    ):
        assert words in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.csv", "--kv-blocks", 5, *STEPS), "nowhere.csv can't be read"),
        (("synthetic", *STEPS), "--kv-blocks"),
        (("synthetic", "--kv-blocks", 5), "--weights, --kv-bytes-per-token, --bandwidth and --tflops are missing"),
        (("synthetic", "--kv-blocks", 5, *STEPS, "--rate", 0), "rate = 0.0"),
        (("synthetic", "--kv-blocks", 5, *STEPS, "--scheduler-policy", "best"), "scheduler_policy = 'best'"),
        (("synthetic", "--kv-blocks", 5, *STEPS, "--weights", "heavy"), "--weights = 'heavy'"),
        (("synthetic", "--kv-blocks", 5, "--step-times", "nowhere"), "nowhere can't be read"),
        (("synthetic", "--plan", "nowhere.json"), "nowhere.json can't be read"),
        (("synthetic", "--kv-block", 5), "did you mean --kv-blocks"),
        (("synthetic", "--kv-blocks", 5, *STEPS, "--cp", 2, "--kv-cache-manager", "v1"), "'v2' under helix"),
        (("synthetic", "--kv-blocks", 5, *STEPS, "--cp", 0), "--cp"),
        (("synthetic", "--kv-blocks", 5, "--model", "nobody-7b", "--offline"), "No model is known as 'nobody-7b'"),
        ((), "TRACE"),
    ],
)
def test_unusable_input_is_a_paragraph(invoke: Invoke, arguments: tuple[object, ...], words: str) -> None:
    result = invoke("simulate", *arguments, "--quiet")
    assert result.status == 2
    assert words in result.paragraph


def test_ranks_that_share_requests_need_their_part_of_the_blocks(invoke: Invoke, trace: Path) -> None:
    """1,100 prompt tokens and 8 new ones are 35 blocks of 32. Of two ranks the first keeps 17 whole blocks, and the 12
    tokens of the prompt's last block with the 8 new ones; of four it keeps 9 whole blocks, and the new tokens."""
    common = ("simulate", trace, *STEPS, "--json", "-q", "--max-batch-size", 1)
    alone = json.loads(invoke(*common, "--kv-blocks", 35).out)
    assert (alone["requests"]["finished"], alone["kv"]["peak_used_blocks"]) == (5, 35)
    assert invoke(*common, "--kv-blocks", 34).status == 1
    for ranks, blocks in ((2, 18), (4, 10)):
        result = invoke(*common, "--cp", ranks, "--kv-blocks", blocks)
        document = json.loads(result.out)
        assert (result.status, result.err) == (0, "")
        assert document["requests"] == {"submitted": 5, "finished": 5, "refused": 0, "failed": 0}
        assert (document["kv"]["blocks"], document["kv"]["peak_used_blocks"]) == (blocks, blocks)
        assert document["kv"]["reused_tokens"] == 0
        assert document["settings"]["kv_cache_manager"] == "v2"
        assert document["settings"]["cp_size"] == ranks
        assert f"rank 0 of {ranks} ranks" in document["notes"][0]
        refused = invoke(*common, "--cp", ranks, "--kv-blocks", blocks - 1)
        assert (refused.status, json.loads(refused.out)["requests"]["refused"]) == (1, 5)


def test_a_group_of_one_is_no_group(invoke: Invoke, trace: Path) -> None:
    common = ("simulate", trace, "--kv-blocks", 200, *STEPS, "--json", "-q")
    assert json.loads(invoke(*common, "--cp", 1).out) == json.loads(invoke(*common).out)


def test_ranks_plan_the_pool_of_one_card(invoke: Invoke, trace: Path) -> None:
    model = ("llama-3.1-8b", "--gpu", "L40S-48GB", "--max-seq-len", 8192, "--offline", "--json", "-q")
    planned = json.loads(invoke("plan", *model, "--kv-cache-manager", "v2", "--no-enable-block-reuse").out)["kv_cache"]
    served = json.loads(invoke("simulate", trace, "--cp", 2, "--model", *model).out)
    assert served["kv"]["blocks"] == planned["blocks"] > 0
    assert served["requests"]["finished"] == 5
