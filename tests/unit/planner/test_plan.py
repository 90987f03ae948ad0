"""Plans: the same figures as a start-up, answers that hold when they are asked again, ways out that are ways out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import onebudget
from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError, ModelError
from onebudget.planner import cache
from onebudget.planner.catalogue.gpus import all_gpus
from onebudget.planner.catalogue.models import model_names
from onebudget.planner.plan import answer, replan
from onebudget.planner.question import Question, make_question
from onebudget.planner.source import ModelSource, resolve_model
from onebudget.units import GIB

SMALL = "Qwen/Qwen3-0.6B"
LLAMA = "meta-llama/Llama-3.1-8B"
CARDS = [gpu.name for gpu in all_gpus()]
MODELS = [resolve_model(name, offline=True) for name in model_names()]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


def total(ledger: Ledger) -> int:
    return sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes


def question(model: str = LLAMA, gpu: str = "H100-SXM-80GB", **asked: Any) -> Question:
    return make_question(model, gpu, revision=None, offline=True, **{"quick": True, **asked})


# -- answers ------------------------------------------------------------------------------------------------------


def test_a_plan_sums_and_can_be_read_back() -> None:
    ledger = onebudget.plan(LLAMA, "H100-SXM-80GB", quick=True, offline=True)
    assert ledger.fits
    assert total(ledger) == ledger.capacity_bytes
    document = ledger.to_dict()
    assert document["request"]["model"] == LLAMA
    assert Ledger.from_dict(json.loads(json.dumps(document))).to_dict() == document


@pytest.mark.parametrize("engine", ["onebudget", "vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("gpu", ["RTX-4090-24GB", "L4"])
def test_the_longest_request_fits_and_a_longer_one_does_not(engine: str, gpu: str) -> None:
    asked = question("Qwen/Qwen2.5-7B-Instruct", gpu, engine=engine)
    answers = answer(asked).answers
    assert answers is not None
    largest = answers.largest_seq_len
    assert largest > 0
    name = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "max_seq_len")
    ledger = asked.with_settings(**{name: largest}).ledger()
    assert ledger.fits
    assert ledger.kv_cache.max_concurrency_at_max_seq_len >= 1
    if answers.seq_len_bound_by != "model":
        longer = asked.with_settings(**{name: largest + 32}).ledger()
        assert not longer.fits or longer.kv_cache.max_concurrency_at_max_seq_len < 1


def test_the_longest_request_of_a_dry_run_fits_and_a_longer_one_does_not() -> None:
    pytest.importorskip("torch")
    asked = question(LLAMA, "RTX-4090-24GB", quick=False, settings={"max_batch_size": 2})
    answers = answer(asked).answers
    assert answers is not None
    assert answers.seq_len_bound_by == "kv_cache"
    for length, holds in ((answers.largest_seq_len, True), (answers.largest_seq_len + 32, False)):
        ledger = asked.with_settings(max_seq_len=length).ledger()
        assert (ledger.fits and ledger.kv_cache.max_concurrency_at_max_seq_len >= 1) is holds


def test_concurrency_counts_whole_blocks_and_seats() -> None:
    ledger = answer(question(target_seq_len=1000, settings={"max_batch_size": 3}))
    answers = ledger.answers
    assert answers is not None
    assert answers.concurrency == pytest.approx(ledger.kv_cache.blocks / 32, abs=1e-3)
    assert (answers.largest_concurrency, answers.concurrency_bound_by) == (3, "max_batch_size")


def test_a_target_that_is_missed_is_a_no_with_ways_out() -> None:
    asked = question("Qwen/Qwen2.5-7B-Instruct", "RTX-4090-24GB", engine="vllm", target_seq_len=8192,
                     target_concurrency=40)  # fmt: skip
    ledger = answer(asked)
    assert ledger.fits
    assert ledger.answers is not None
    assert not ledger.answers.meets_target
    assert ledger.changes
    for change in ledger.changes:
        after = replan(asked, change.set)
        assert after.answers is not None
        assert after.answers.meets_target


def test_others_on_the_card_take_their_share() -> None:
    alone, beside = question().ledger(), question(free_bytes=60 * GIB).ledger()
    others = beside.term("other_processes").bytes
    assert others == alone.capacity_bytes - 60 * GIB - alone.term("context").bytes
    assert beside.kv_cache.bytes == pytest.approx(alone.kv_cache.bytes - others * 9 // 10, abs=2)


# -- ranks and hosts ----------------------------------------------------------------------------------------------


def test_ranks_of_one_stage_are_alike_and_stages_differ() -> None:
    ledger = answer(question("meta-llama/Llama-3.1-70B", "H100-SXM-80GBx4", engine="vllm", tp=2, pp=2))
    assert [line.rank for line in ledger.ranks] == [0, 1, 2, 3]
    first, second, third, fourth = ledger.ranks
    assert (first.kv_bytes, third.kv_bytes) == (second.kv_bytes, fourth.kv_bytes)
    assert min(line.kv_bytes for line in ledger.ranks) == ledger.kv_cache.bytes
    assert all(line.tokens is not None and line.tokens >= ledger.kv_cache.tokens for line in ledger.ranks)


def test_a_host_pays_for_every_rank() -> None:
    asked = question(
        "meta-llama/Llama-3.1-70B", "H100-SXM-80GBx4", engine="vllm", engine_version="0.6.6",
        settings={"swap_space": 100},
    )  # fmt: skip
    ledger = answer(asked, host_memory_bytes=256 * GIB)
    lines = {line.name: line for line in ledger.host}
    assert lines["kv_swap"].bytes == 80 * 2 * GIB  # 1.25 GiB for each of 80 layers, pinned
    together = lines["all_ranks_of_a_host"]
    assert together.per == "host"
    assert together.bytes == 4 * sum(line.bytes for line in ledger.host if line.per == "rank")
    assert any("4 ranks take" in warning for warning in ledger.warnings)


# -- what does not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpu", "engine"),
    [
        ("meta-llama/Llama-3.1-70B", "H100-SXM-80GB", "onebudget"),
        ("meta-llama/Llama-3.1-70B", "RTX-4090-24GB", "vllm"),
        ("Qwen/Qwen3-32B", "RTX-4090-24GB", "sglang"),
        ("Qwen/Qwen3-32B", "L4", "trtllm"),
        ("deepseek-ai/DeepSeek-V3", "H200-141GB", "onebudget"),
        ("deepseek-ai/DeepSeek-V3", "L4", "vllm"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "A100-40GB", "vllm"),
    ],
)
def test_what_does_not_fit_says_how_much_is_missing_and_what_fits(model: str, gpu: str, engine: str) -> None:
    asked = question(model, gpu, engine=engine)
    ledger = answer(asked)
    assert not ledger.fits
    assert ledger.shortfall_bytes > 0
    assert ledger.kv_cache.bytes == 0
    assert total(ledger) == ledger.capacity_bytes
    assert ledger.changes
    assert all(replan(asked, change.set).fits for change in ledger.changes)


def test_a_cap_that_is_too_low_is_lifted_first() -> None:
    ledger = answer(question(settings={"max_gpu_total_bytes": 1024}))
    assert not ledger.fits
    assert list(ledger.changes[0].set) == ["max_gpu_total_bytes"]


# -- every model, every card --------------------------------------------------------------------------------------


def check_everywhere(cards: list[str], models: list[ModelSource]) -> int:
    fitting = 0
    for model in models:
        for card in cards:
            ledger = Question(model=model, gpu=card, quick=True).ledger()
            assert total(ledger) == ledger.capacity_bytes, (model.name, card)
            assert ledger.fits == (ledger.kv_cache.blocks > 0) == (ledger.shortfall_bytes == 0), (model.name, card)
            fitting += ledger.fits
    return fitting


def test_every_model_plans_on_some_cards() -> None:
    assert check_everywhere(CARDS[::16], MODELS) > len(MODELS)


@pytest.mark.long
def test_every_model_plans_on_every_card() -> None:
    assert check_everywhere(CARDS, MODELS) > 20 * len(MODELS)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["onebudget", "vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.name))
def test_whatever_does_not_fit_a_small_card_has_a_way_out(model: ModelSource, engine: str) -> None:
    asked = Question(model=model, gpu="L4", engine=engine, quick=True)
    ledger = answer(asked)
    if not ledger.fits:
        assert ledger.changes
        assert all(replan(asked, change.set).fits for change in ledger.changes)


# -- wrong input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpu": "H1000"}, "Did you mean H100"),
        ({"tp": 3, "gpu": "H100x3"}, "tp = 3 does not divide the 32 attention and 8 KV heads"),
        ({"tp": 4, "gpu": "H100x8"}, "needs 4 cards, and 8 were named"),
        ({"pp": 64, "tp": 1, "gpu": "H100x64"}, "more than the 32 layers"),
        ({"ep": 2, "tp": 2, "gpu": "H100x2"}, "has none: leave ep at 1"),
        ({"engine": "vlm"}, "Did you mean vllm"),
        ({"engine": "vllm", "settings": {"gpu_memory_utilisation": 0.9}}, "did you mean gpu_memory_utilization"),
        ({"max_sequence_len": 9}, "max_seq_len"),
        ({"gpu_total": "12 parsecs"}, "a size such as 80GB"),
        ({"gpu_total": "1KiB"}, "not plausible"),
        ({"gpu_free": "81GiB", "gpu_total": "80GiB"}, "at most the card's"),
        ({"kv_dtype": "fp9"}, "did you mean fp8"),
        ({"kv_dtype": "fp8"}, "only latent attention can store FP8"),
        ({"weights_dtype": "bf17"}, "did you mean bf16"),
        ({"max_seq_len": 10**20}, "max_seq_len"),
        ({"target_concurrency": 0}, "from 1 to"),
        ({"target_seq_len": -5}, "from 1 to"),
    ],
)
def test_wrong_input_is_one_sentence_with_what_was_meant(asked: dict[str, Any], says: str) -> None:
    gpu = asked.pop("gpu", "H100-SXM-80GB")
    with pytest.raises(ConfigError) as refused:
        onebudget.plan(LLAMA, gpu, quick=True, offline=True, **asked)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_its_sizes_is_refused(missing: str) -> None:
    source = resolve_model(LLAMA, offline=True)
    config = {name: value for name, value in source.config.items() if name not in (missing, "head_dim")}
    with pytest.raises(ModelError):
        answer(Question(model=replace(source, config=config), gpu="H100-SXM-80GB", quick=True))


def test_no_code_of_a_model_folder_is_run(tmp_path: Path) -> None:
    source = resolve_model(LLAMA, offline=True)
    config = {**source.config, "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    ledger = onebudget.plan(folder, "H100-SXM-80GB")
    assert ledger.fits
    assert not (tmp_path / "ran").exists()


# -- the cache ----------------------------------------------------------------------------------------------------


def test_an_equal_question_is_read_from_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = onebudget.plan(SMALL, "L4", quick=True, offline=True)
    assert len(list(own_cache.glob("*.json"))) == 1
    monkeypatch.setattr("onebudget.planner.plan.answer", lambda *args, **kwargs: pytest.fail("planned again"))
    assert onebudget.plan(SMALL, "L4", quick=True, offline=True) == first


@pytest.mark.parametrize("changed", [{"gpu": "L40S"}, {"max_seq_len": 99}, {"quick": False}, {"tp": 1}])
def test_another_question_has_another_key(changed: dict[str, Any]) -> None:
    asked = {"model": SMALL, "gpu": "L4", "quick": True}
    assert cache.plan_key(asked) == cache.plan_key(dict(reversed(asked.items())))
    assert cache.plan_key(asked) != cache.plan_key({**asked, **changed})


def test_a_changed_config_file_is_another_question(tmp_path: Path) -> None:
    source = resolve_model(SMALL, offline=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(source.config)))
    before = onebudget.plan(path, "L4", quick=True)
    path.write_text(json.dumps({**source.config, "num_hidden_layers": 3}))
    assert onebudget.plan(path, "L4", quick=True).kv_cache.bytes_per_token < before.kv_cache.bytes_per_token


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"document": 3}'])
def test_a_damaged_entry_is_made_anew(own_cache: Path, damage: str) -> None:
    first = onebudget.plan(SMALL, "L4", quick=True, offline=True)
    (entry,) = own_cache.glob("*.json")
    entry.write_text(damage)
    assert onebudget.plan(SMALL, "L4", quick=True, offline=True) == first


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path / "file"))
    assert onebudget.plan(SMALL, "L4", quick=True, offline=True).fits


def test_neither_a_kept_plan_nor_a_quick_one_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys, onebudget\n"
        f"ledger = onebudget.plan({SMALL!r}, 'L4', quick={{}}, offline=True)\n"
        "print(ledger.kv_cache.tokens, 'torch' in sys.modules)"
    )
    quick = subprocess.run([sys.executable, "-c", code.format(True)], capture_output=True, text=True, check=True)
    assert quick.stdout.split()[1] == "False"
    pytest.importorskip("torch")
    runs = [
        subprocess.run([sys.executable, "-c", code.format(False)], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split()[1] for run in runs] == ["True", "False"]
    assert runs[0].stdout.split()[0] == runs[1].stdout.split()[0]
