"""The ledger of a real engine: a dry run tells it to the byte, caps bind, and what it advises can be built."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, SamplingParams
from onebudget.budget.ledger import Ledger
from onebudget.budget.probe_load import probe_pool
from onebudget.budget.profile import ProfileResult
from onebudget.core import RequestOutput
from onebudget.device import open_device
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind
from onebudget.engine.dry_runs import dry_profile
from onebudget.engine.probe import measure
from onebudget.errors import AllocationError, BudgetError

Tiny = Callable[[TinyKind], Path]
KNOBS: dict[str, Any] = {"dtype": "fp32", "device_memory": "24MiB", "max_seq_len": 256, "max_num_tokens": 512}
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def total(ledger: Ledger) -> int:
    return sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes


def block_bytes(ledger: Ledger) -> int:
    return ledger.kv_cache.bytes_per_token * ledger.kv_cache.tokens_per_block


# -- the profile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("knobs", [{}, {"max_num_tokens": 48, "max_batch_size": 3, "tokens_per_block": 5}])
def test_a_dry_run_profiles_what_the_device_measures(
    tiny: Tiny, kind: TinyKind, dtype: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[ProfileResult] = []

    def noted(*args: Any) -> tuple[ProfileResult, int]:
        profile, rounding = measure(*args)
        measured.append(profile)
        return profile, rounding

    monkeypatch.setattr("onebudget.engine.build.measure", noted)
    with LLM(tiny(kind), **{**KNOBS, **knobs, "dtype": dtype}) as llm:
        dry = dry_profile(tiny(kind), TORCH_NAMES[dtype], llm.config)
    assert dry.model_bytes == measured[0].model_bytes
    assert dry.torch_peak_bytes == measured[0].torch_peak_bytes
    assert dry.allocated_bytes == measured[0].allocated_bytes


@pytest.mark.parametrize("kind", ["gqa", "sliding", "mla"])
def test_the_probes_own_kv_cancels_out(tiny: Tiny, kind: TinyKind, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*args: Any, **kwargs: Any) -> Any:
        pool = probe_pool(*args, **kwargs)
        return replace(pool, tokens=2 * pool.tokens, blocks=2 * pool.blocks)

    with LLM(tiny(kind), **KNOBS) as llm:
        once, (group,) = llm.budget.to_dict(), llm.engine.executor.kv.groups
        pool = group.num_blocks - group.set_aside_blocks
    monkeypatch.setattr("onebudget.engine.probe.probe_pool", doubled)
    with LLM(tiny(kind), **KNOBS) as llm:
        twice = llm.budget.to_dict()
    assert pool == once["kv_cache"]["blocks"]
    for ledger in (once, twice):
        for term in ledger["terms"]:
            del term["why"]  # names the probe's own figures
    assert once == twice


# -- the ledger of an engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_everything_is_somewhere(tiny: Tiny, kind: TinyKind) -> None:
    with LLM(tiny(kind), **KNOBS) as llm:
        ledger, report, device = llm.budget, llm.memory_report(), llm.engine.station.device
        assert ledger.fits
        assert total(ledger) == ledger.capacity_bytes == device.total_bytes == 24 * 2**20
        measured = {term["name"]: term["bytes"] for term in report["terms"]}
        assert sum(measured.values()) + report["kv_cache"]["bytes"] + report["unassigned_bytes"] == device.total_bytes
        assert measured["weights"] == ledger.term("weights").bytes
        assert report["kv_cache"]["bytes"] == ledger.kv_cache.blocks * block_bytes(ledger)
        assert ledger.kv_cache.bytes - report["kv_cache"]["bytes"] < block_bytes(ledger)
        pools_bytes = llm.engine.executor.kv.allocated_bytes  # with the blocks that pad batches
        assert device.used_by_owner()["kv_cache"] == -(-pools_bytes // 512) * 512
        assert ledger.device.total_bytes == 24 * 2**20
        assert Ledger.from_dict(ledger.to_dict()).to_dict() == ledger.to_dict()


def test_the_fraction_leaves_its_share(tiny: Tiny) -> None:
    with LLM(tiny("gqa"), **KNOBS, free_gpu_memory_fraction=1.0) as llm:
        whole = llm.budget
    with LLM(tiny("gqa"), **KNOBS, free_gpu_memory_fraction=0.5) as llm:
        half = llm.budget
    assert "fraction_slack" not in {term.name for term in whole.terms}
    # Reserves cut from the pool are outside the fraction's share.
    cuts = sum(term.bytes for term in whole.terms if "from the pool's share" in term.why)
    left = whole.kv_cache.bytes + cuts
    assert half.kv_cache.bytes + cuts == left // 2
    assert half.term("fraction_slack").bytes == left - left // 2
    assert whole.unassigned_bytes == half.unassigned_bytes == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(320, 10), (351, 10), (352, 11)])
def test_a_token_cap_binds_and_leaves_the_rest_unassigned(tiny: Tiny, tokens: int, blocks: int) -> None:
    with LLM(tiny("gqa"), **KNOBS, kv_max_tokens=tokens) as llm:
        ledger = llm.budget
        assert (ledger.kv_cache.tokens, ledger.kv_cache.blocks) == (tokens, blocks)
        assert llm.engine.executor.kv.max_resource_count() == blocks
        assert [cap.name for cap in ledger.caps if cap.binding] == ["kv_max_tokens"]
        assert ledger.unassigned_bytes > 0
        assert total(ledger) == ledger.capacity_bytes


def test_a_byte_cap_binds_and_leaves_the_rest_unassigned(tiny: Tiny) -> None:
    with LLM(tiny("gqa"), **KNOBS, max_gpu_total_bytes="1MiB") as llm:
        ledger = llm.budget
        assert ledger.kv_cache.bytes <= 2**20
        assert ledger.kv_cache.blocks == ledger.kv_cache.bytes // block_bytes(ledger)
        assert [cap.name for cap in ledger.caps if cap.binding] == ["max_gpu_total_bytes"]
        assert total(ledger) == ledger.capacity_bytes


def test_caps_that_do_not_bind_change_nothing(tiny: Tiny) -> None:
    with LLM(tiny("gqa"), **KNOBS) as llm:
        free = llm.budget.kv_cache
    with LLM(tiny("gqa"), **KNOBS, kv_max_tokens=10**9, max_gpu_total_bytes="1GiB") as llm:
        assert llm.budget.kv_cache == free


def test_one_block_is_enough_to_serve_what_fits_in_it(tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(tiny("gqa"), **KNOBS, kv_max_tokens=32) as llm:
        assert llm.budget.kv_cache.blocks == 1
        assert any("holds 32 tokens, less than one request" in warning for warning in llm.budget.warnings)
        outputs = llm.generate([[5] * 28, [5] * 29, [6]], params)
        assert [output.finish_reason for output in outputs] == ["length", "refused", "length"]


def test_more_memory_is_more_cache_and_nothing_else(tiny: Tiny) -> None:
    ledgers = []
    for memory in ("24MiB", "25MiB"):
        with LLM(tiny("gqa"), **{**KNOBS, "device_memory": memory}, free_gpu_memory_fraction=1.0) as llm:
            ledgers.append(llm.budget)
    assert ledgers[1].kv_cache.bytes - ledgers[0].kv_cache.bytes == 2**20
    assert [(term.name, term.bytes) for term in ledgers[0].terms] == [(t.name, t.bytes) for t in ledgers[1].terms]


# -- cards that are too small -------------------------------------------------------------------------------------


def too_small(folder: Path, **knobs: Any) -> Ledger:
    with pytest.raises(BudgetError) as refused:
        LLM(folder, **knobs)
    ledger = refused.value.ledger
    assert ledger is not None
    return ledger


@pytest.mark.parametrize("memory", [2**12, 2**17, 2**19, 2**20, 3 * 2**19])
def test_a_card_too_small_comes_with_a_ledger_that_sums(tiny: Tiny, memory: int) -> None:
    ledger = too_small(tiny("gqa"), **{**KNOBS, "device_memory": memory})
    assert not ledger.fits
    assert total(ledger) == ledger.capacity_bytes == memory
    assert (ledger.kv_cache.bytes, ledger.kv_cache.blocks, ledger.kv_cache.tokens) == (0, 0, 0)
    assert ledger.shortfall_bytes > 0
    assert ledger.changes
    assert all(change.fits for change in ledger.changes)


def test_nothing_is_left_behind_on_a_card_that_was_too_small(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    original = open_device

    def noted(*args: Any, **kwargs: Any) -> Any:
        devices.append(original(*args, **kwargs))
        return devices[-1]

    monkeypatch.setattr("onebudget.engine.llm.open_device", noted)
    for memory in (2**12, 2**19, 2**20):
        too_small(tiny("gqa"), **{**KNOBS, "device_memory": memory})
    gc.collect()  # frames of the errors that were caught hold tensors
    assert [(device.closed, device.account.used_bytes) for device in devices] == [(True, 0)] * 3


@pytest.mark.parametrize("kind", ["gqa", pytest.param("moe", marks=pytest.mark.long)])
def test_every_change_that_is_advised_can_be_built(tiny: Tiny, kind: TinyKind) -> None:
    for memory in (2**20, 2**21, 2**22):
        knobs = {**KNOBS, "max_num_tokens": 2048, "device_memory": memory}
        for change in too_small(tiny(kind), **knobs).changes:
            with LLM(tiny(kind), **{**knobs, **change.set}) as llm:
                assert llm.budget.fits
                assert llm.generate([[5]], SamplingParams(max_tokens=2, temperature=0))[0].error is None


@pytest.mark.parametrize("kind", ["gqa", pytest.param("moe", marks=pytest.mark.long)])
def test_changes_that_shrink_the_engine_can_be_built(tiny: Tiny, kind: TinyKind) -> None:
    """As above without the larger card."""
    tried = set()
    for memory in (2**20, 2**22):
        knobs = {**KNOBS, "max_num_tokens": 2048, "device_memory": memory}
        for change in too_small(tiny(kind), **knobs).changes:
            if "device_memory" in change.set:
                continue
            tried.add(tuple(change.set))
            with LLM(tiny(kind), **{**knobs, **change.set}) as llm:
                assert llm.generate([[5]], SamplingParams(max_tokens=2, temperature=0))[0].error is None
    assert len(tried) >= 2


def test_the_shortfall_is_what_is_missing_to_the_byte(tiny: Tiny) -> None:
    ledger = too_small(tiny("gqa"), **{**KNOBS, "device_memory": 2**20})
    again = too_small(tiny("gqa"), **{**KNOBS, "device_memory": 2**20 + 4096})
    assert ledger.shortfall_bytes - again.shortfall_bytes == 4096


def test_every_card_either_serves_or_gets_a_budget_error(tiny: Tiny) -> None:
    """From far too small upwards: once a card serves, every larger one does."""
    knobs = {**KNOBS, "max_num_tokens": 2048, "free_gpu_memory_fraction": 1.0}
    fits = []
    for memory in range(5 * 2**20, 8 * 2**20, 2**18):
        ledger = ledger_of(tiny("gqa"), **{**knobs, "device_memory": memory})
        assert total(ledger) == memory
        fits.append(ledger.fits)
    assert fits == sorted(fits)
    assert fits[0] != fits[-1]


def ledger_of(folder: Path, **knobs: Any) -> Ledger:
    """The ledger of an engine, or of the refusal to build it."""
    try:
        with LLM(folder, **knobs) as llm:
            ledger: Ledger | None = llm.budget
    except BudgetError as error:
        ledger = error.ledger
    assert ledger is not None
    return ledger


# -- the promise: what was planned is enough ----------------------------------------------------------------------


def workload(llm: LLM, requests: int, seed: int = 0) -> list[RequestOutput]:
    """Prompts of any length, the longest and the shortest often, some sampled, some greedy."""
    numbers, longest = random.Random(seed), llm.config.max_seq_len
    prompts = []
    for _ in range(requests):
        length = numbers.choice([1, 2, longest, longest - 1, numbers.randint(1, longest)])
        prompts.append([numbers.randrange(4, 260) for _ in range(length)])
    params = [
        SamplingParams(
            max_tokens=numbers.randint(1, 24), temperature=numbers.choice([0, 0.8]), top_k=numbers.choice([0, 10]),
            top_p=numbers.choice([1.0, 0.9]), seed=number, ignore_eos=True,
            repetition_penalty=1.2 if number % 5 == 4 else 1.0, prompt_ignore_length=number % 3,
            prompt_logprobs=2 if number % 7 == 6 else None, logprobs=1 if number % 6 == 5 else None,
        )
        for number in range(requests)
    ]  # fmt: skip
    outputs: list[RequestOutput] = llm.generate(prompts, params)
    return outputs


def exact_memory(folder: Path, **knobs: Any) -> int:
    """A capacity that leaves nothing over in the pool beyond whole blocks."""
    ledger = ledger_of(folder, **knobs)
    return ledger.capacity_bytes - (ledger.kv_cache.bytes - ledger.kv_cache.blocks * block_bytes(ledger))


SHAPES: dict[str, dict[str, Any]] = {
    "large steps": {"max_num_tokens": 1024},
    "chunks": {"max_num_tokens": 64},
    "few rows": {"max_num_tokens": 300, "max_batch_size": 2},
    "one token": {"max_num_tokens": 8, "max_seq_len": 64},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "fp32") for kind in TINY_KINDS), ("gqa", "bf16")])
def test_no_step_ever_needs_more_than_was_planned(tiny: Tiny, kind: TinyKind, dtype: str, shape: str) -> None:
    knobs = {**KNOBS, "max_seq_len": 512, **SHAPES[shape], "dtype": dtype, "free_gpu_memory_fraction": 1.0}
    knobs["device_memory"] = exact_memory(tiny(kind), **knobs)
    with LLM(tiny(kind), **knobs, strict_memory=True) as llm:
        outputs = workload(llm, 24)
        assert {output.error for output in outputs} == {None}
        assert llm.engine.executor.counters.failed_steps == 0
        report = llm.memory_report()
        peaks = {term["name"]: term["peak_bytes"] for term in report["terms"]}
        planned = {term.name: term.bytes for term in llm.budget.terms}
        peaks.pop("fragmentation", None)
        assert {name: peak for name, peak in peaks.items() if peak > planned.get(name, 0)} == {}
        assert report["peak_bytes"] <= llm.budget.capacity_bytes


def test_strict_memory_fails_the_step_that_would_not_fit_and_nothing_else(tiny: Tiny) -> None:
    """With somebody else on the card the largest step has no room: its requests end, the next ones are served."""
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM(tiny("gqa"), **KNOBS, strict_memory=True) as llm:
        device = llm.engine.station.device
        wanted = llm.generate([[5, 6]], params)[0].token_ids
        device.empty_cache()
        taken = device.free_bytes() - 2**17
        device.charge_tensor_bytes(taken, "somebody")
        outputs = llm.generate([[number] * 250 for number in (5, 6)], params)
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert (outputs[0].error or "").startswith("AllocationError: out of gpu memory for activations")
        assert llm.generate([[5, 6]], params)[0].token_ids == wanted
        device.refund_tensor_bytes(taken, "somebody")
        assert llm.generate([[5] * 250], params)[0].finish_reason == "length"
        assert isinstance(llm.engine.executor.last_error, AllocationError)
