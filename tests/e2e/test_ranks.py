"""Several ranks as real processes, started by torchrun: one model, one answer, one failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onebudget import LLM, SamplingParams
from onebudget.devtools.tiny_models import TINY_KINDS, tiny_model

WORKER = Path(__file__).with_name("rank_engine.py")
PROMPTS = ["Hello there", "abc " * 20, "x", "The quick brown fox"]
DEALT = [*PROMPTS, "zz top " * 9, "a b c d e f g", "one two"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
KINDS = sorted(TINY_KINDS)
OWN_KINDS = ("mla", "moe", "odd")
ODD_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def torchrun(*arguments: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=environ, timeout=300, check=False
    )


def carry_out(scenario: str, folder: Path, results: Path) -> tuple[int, list[dict[str, Any]]]:
    done = torchrun(WORKER, scenario, folder, results)
    written = [results / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in written), done.stderr
    return done.returncode, [json.loads(file.read_text()) for file in written]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind; ``mixed`` has tied embeddings."""
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny_model(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    status, ranks = carry_out("serve", models, tmp_path_factory.mktemp("served"))
    assert status == 0
    return ranks


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one(kind: str, models: Path, served: list[dict[str, Any]]) -> None:
    with LLM(models / kind, device_memory="24MiB", dtype="fp32", max_seq_len=128) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    expected = [output.token_ids for output in outputs]
    assert [rank[kind]["tokens"] for rank in served] == [expected, expected]


@pytest.mark.parametrize("kind", KINDS)
def test_cards_of_different_size_hold_equal_tokens(kind: str, served: list[dict[str, Any]]) -> None:
    first, second = (rank[kind]["ledger"] for rank in served)
    for name in ("tokens", "blocks", "bytes"):
        assert first["kv_cache"][name] == second["kv_cache"][name]
    assert first["kv_cache"]["bytes"] == first["kv_cache"]["tokens"] * first["kv_cache"]["bytes_per_token"]
    assert (first["limiting_rank"], second["limiting_rank"]) == (1, 1)
    assert first["ranks"] == second["ranks"]
    offered = [(line["capacity_bytes"], line["kv_bytes"]) for line in first["ranks"]]
    assert [capacity for capacity, _ in offered] == [12 * 2**20, 10 * 2**20]
    assert offered[0][1] > offered[1][1] >= first["kv_cache"]["bytes"]
    for ledger, (capacity, kv_bytes) in zip((first, second), offered, strict=True):
        used = sum(term["bytes"] for term in ledger["terms"])
        assert used + ledger["kv_cache"]["bytes"] + ledger["unassigned_bytes"] == ledger["capacity_bytes"] == capacity
        assert ledger["unassigned_bytes"] >= kv_bytes - ledger["kv_cache"]["bytes"]


def test_a_rank_holds_its_part_of_weights_and_cache(served: list[dict[str, Any]]) -> None:
    # Embedding and head 320 x 64 each, and per layer 4 matrices of attention (64 x 64 twice, 64 x 32 twice) and 3 of
    # 64 x 128, all halved; two norms of 64 per layer and one at the end are whole, and 8 frequencies.
    halved = 2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    whole = 5 * 64 + 2 * 16  # the frequencies are kept twice, each in 64 B
    for rank in served:
        terms = {term["name"]: term["bytes"] for term in rank["gqa"]["ledger"]["terms"]}
        assert terms["weights"] == -(-(halved // 2 + whole) * 4 // 512) * 512
        assert rank["gqa"]["ledger"]["kv_cache"]["bytes_per_token"] == 2 * 2 * (2 // 2) * 16 * 4


def test_a_dry_run_of_one_rank_needs_what_the_profile_saw(served: list[dict[str, Any]]) -> None:
    for rank in served:
        activations = next(term for term in rank["ledger"]["terms"] if term["name"] == "activations")
        assert rank["dry"]["activations"] == activations["bytes"]


def test_random_tokens_are_the_same_on_all_ranks(served: list[dict[str, Any]]) -> None:
    assert served[0]["random"] == served[1]["random"]
    assert served[0]["random"] != served[0]["gqa"]["tokens"]


def test_an_interrupt_stops_all_ranks_at_the_same_step(served: list[dict[str, Any]]) -> None:
    assert served[0]["interrupted"] == served[1]["interrupted"]
    assert 0 < sum(served[0]["interrupted"]) < 4 * 12


def test_weights_read_again_after_sleep_are_this_ranks(served: list[dict[str, Any]]) -> None:
    assert [rank["awake"] for rank in served] == [rank["gqa"]["tokens"] for rank in served]


def test_a_rank_that_fails_in_the_profile_ends_all(models: Path, tmp_path: Path) -> None:
    status, (first, second) = carry_out("fail_in_profile", models / "gqa", tmp_path)
    assert status != 0
    assert (second["error"], second["message"]) == ("OSError", "injected")
    assert first["error"] == "AgreementError"
    assert first["message"] == "rank 1 failed in stage 'profile': OSError: injected"


@pytest.mark.long
def test_a_card_that_is_too_small_is_everybodys_ledger(models: Path, tmp_path: Path) -> None:
    status, (first, second) = carry_out("too_small", models / "gqa", tmp_path)
    assert status != 0
    assert (first["error"], second["error"]) == ("BudgetError", "BudgetError")
    assert (first["fits"], second["fits"]) == (False, False)
    assert first["message"] == f"rank 1: {second['message']}"


@pytest.mark.long
def test_ranks_must_be_started_alike(models: Path, tmp_path: Path) -> None:
    status, ranks = carry_out("started_unlike", models / "gqa", tmp_path)
    assert status != 0
    for rank in ranks:
        assert rank["error"] == "AgreementError"
        assert "max_batch_size is 3 on rank 0, 4 on rank 1" in rank["message"]


# -- requests of their own --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention, experts, and heads that two ranks could not share."""
    folder = tmp_path_factory.mktemp("own")
    tiny_model("mla", folder / "mla")
    tiny_model("moe", folder / "moe")
    tiny_model("gqa", folder / "odd", **ODD_HEADS)
    return folder


@pytest.fixture(scope="module")
def served_own(own_models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    status, ranks = carry_out("serve_own", own_models, tmp_path_factory.mktemp("served"))
    assert status == 0, ranks
    return ranks


@pytest.fixture(scope="module")
def alone(own_models: Path) -> dict[str, list[list[int]]]:
    """Tokens of one process for the same prompts, by kind of model."""
    tokens = {}
    for kind in OWN_KINDS:
        with LLM(own_models / kind, device_memory="24MiB", dtype="fp32", max_seq_len=128) as llm:
            tokens[kind] = [output.token_ids for output in llm.generate(DEALT, GREEDY)]
    return tokens


def test_requests_dealt_to_two_ranks_get_the_tokens_of_one_process(
    alone: dict[str, list[list[int]]], served_own: list[dict[str, Any]]
) -> None:
    for rank in served_own:
        assert {kind: rank[kind]["tokens"] for kind in OWN_KINDS} == alone
        assert rank["plain"]["tokens"] == rank["awake"] == alone["odd"]


@pytest.mark.parametrize("kind", [*OWN_KINDS, "plain"])
def test_an_idle_rank_joins_and_nothing_is_held_at_the_end(kind: str, served_own: list[dict[str, Any]]) -> None:
    first, second = (rank[kind] for rank in served_own)
    assert first["refused"] == second["refused"] == ["refused", "length"]
    assert first["held"] == second["held"] == [0, 0, 0]
    # Prompts of 11, 1, 19 and 63 tokens, and 3 in the second call; the other rank has those of 80, 13 and 7.
    counters = [rank["counters"] for rank in (first, second)]
    assert counters[0]["steps"] == counters[1]["steps"]
    assert [each["postponed_steps"] for each in counters] == [0, 0]
    assert counters[1]["padded_steps"] > counters[0]["padded_steps"]
    assert [each["decode_tokens"] for each in counters] == [5 * 11, 3 * 11]
    assert [each["prefill_tokens"] + each["reused_tokens"] for each in counters] == [97, 100]
    for rank in (first, second):
        assert rank["throughput"]["new_tokens"] == (len(DEALT) + 1) * 12


def test_a_rank_with_its_own_requests_holds_all_heads_and_a_part_of_the_layers_behind(
    served_own: list[dict[str, Any]],
) -> None:
    # Embedding and head 320 x 96 each, and per layer 4 matrices of attention (96 x 96 twice, 96 x 48 twice) are whole,
    # as five norms and twice 8 frequencies; 3 matrices of 96 x 128 per layer are halved.
    whole = 2 * 320 * 96 + 2 * (2 * 96 * 96 + 2 * 96 * 48) + 5 * 96 + 2 * 16
    halved = 2 * 3 * 96 * 128
    for rank in served_own:
        ledger = rank["odd"]["ledger"]
        terms = {term["name"]: term["bytes"] for term in ledger["terms"]}
        assert terms["weights"] == -(-(whole + halved // 2) * 4 // 512) * 512
        assert ledger["kv_cache"]["bytes_per_token"] == 2 * 2 * 3 * 16 * 4
        # Counts and a mask over 320 tokens in whole pages: the seats of three requests, and that of a dummy.
        assert terms["penalty_workspace"] == -(-4 * 320 * 4 // 4096) * 4096 + 4096


def test_a_dry_run_knows_the_gathered_activations_and_caches_are_equal(served_own: list[dict[str, Any]]) -> None:
    first, second = served_own
    for kind in OWN_KINDS:
        for rank in served_own:
            terms = {term["name"]: term["bytes"] for term in rank[kind]["ledger"]["terms"]}
            assert rank[kind]["dry"] == terms["activations"]
        ledgers = [rank[kind]["ledger"] for rank in served_own]
        assert ledgers[0]["kv_cache"] == ledgers[1]["kv_cache"]
        assert ledgers[0]["ranks"] == ledgers[1]["ranks"]
        assert [ledger["limiting_rank"] for ledger in ledgers] == [1, 1]
    assert first["stream"] == second["stream"] != ""


@pytest.mark.long
def test_the_demo_model_whose_heads_two_ranks_cannot_share_serves_dealt_requests(
    demo_model: Path, tmp_path: Path
) -> None:
    status, ranks = carry_out("serve_demo", demo_model, tmp_path)
    assert status == 0, ranks
    with LLM(demo_model, device_memory="1GiB", dtype="fp32", max_seq_len=128) as llm:
        expected = [output.token_ids for output in llm.generate(DEALT, GREEDY)]
    assert [rank["tokens"] for rank in ranks] == [expected, expected]
    assert [rank["held"] for rank in ranks] == [[0, 0, 0]] * 2
    assert sum(rank["counters"]["padded_steps"] for rank in ranks) > 0


def test_an_interrupt_stops_ranks_with_their_own_requests_together(served_own: list[dict[str, Any]]) -> None:
    assert served_own[0]["interrupted"] == served_own[1]["interrupted"]
    assert 0 < sum(served_own[0]["interrupted"]) < 4 * 12


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_fails_on_one_rank_leaves_the_others_alone(
    overlap: bool, alone: dict[str, list[list[int]]], served_own: list[dict[str, Any]]
) -> None:
    first, second = (rank[f"failing, overlap {overlap}"] for rank in served_own)
    assert first == second
    assert first["held"] == [0, 0, 0]
    for call, error in (("blocks", "CapacityError: no block"), ("sampling", "ValueError: no number")):
        failed = [output["error"] for output in first[call] if output["reason"] == "error"]
        assert failed and set(failed) == {error}
        for output, expected in zip(first[call], alone["odd"], strict=True):
            assert output["reason"] == "error" or output["tokens"] == expected
    assert sum(output["reason"] == "error" for output in first["blocks"]) == 1


def test_a_rank_that_fails_inside_the_model_ends_all(own_models: Path, tmp_path: Path) -> None:
    status, (first, second) = carry_out("fail_in_forward", own_models / "odd", tmp_path)
    assert status != 0
    assert (second["error"], second["message"]) == ("ValueError", "no number")
    assert first["error"] == "AgreementError"
    assert first["message"] == "rank 1 failed in stage 'generate': ValueError: no number"


# -- refusals and the command line ------------------------------------------------------------------------------


def test_heads_that_two_ranks_cannot_share_are_refused_before_loading(tmp_path: Path) -> None:
    folder = tiny_model("gqa", tmp_path / "odd", **ODD_HEADS)
    (folder / "model.safetensors").unlink()
    done = torchrun("-m", "onebudget", "run", folder, "--prompt", "a", "--quiet", "--device-memory", "12MiB")
    assert done.returncode == 1  # torchrun's own; that of every rank is 2
    assert done.stderr.count("exitcode  : 2") == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == [
        "error: odd has 3 KV heads, which 2 ranks can't share evenly (6 attention and 3 KV heads): 3 ranks would do."
    ]


@pytest.mark.long
def test_the_command_line_prints_one_document(models: Path) -> None:
    done = torchrun(
        "-m", "onebudget", "run", models / "gqa", "--prompt", "Hello there", "--max-tokens", "12", "--json",
        "--device-memory", "12MiB", "--dtype", "fp32", "--max-seq-len", "128",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["ranks"]) == 2
    assert [request["finish_reason"] for request in document["requests"]] == ["length"]
