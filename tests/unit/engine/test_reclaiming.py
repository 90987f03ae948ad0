"""Scratch of a real engine grows for a long prompt and comes back, without a word in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, SamplingParams
from onebudget.core import Request

Tiny = Callable[[str], Path]
KNOBS: dict[str, Any] = {
    "dtype": "fp32", "device_memory": "24MiB", "max_seq_len": 512, "max_num_tokens": 512, "max_batch_size": 4,
    "tokens_per_block": 8, "enable_cuda_graphs": False, "overlap": False, "enable_block_reuse": False, "offline": True,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG, SHORT = [7] * 400, [7] * 10


@pytest.fixture(params=["gqa", "mla"])
def folder(tiny: Tiny, request: pytest.FixtureRequest) -> Path:
    return tiny(request.param)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, trim_after_shrink=True, **KNOBS) as llm:
        yield llm


def capacities(llm: LLM, *prompts: list[int], steps: int) -> list[int]:
    """Scratch after each step of a request with one of ``prompts``, each served for ``steps`` steps."""
    executor, held = llm.engine.executor, []
    for number, prompt in enumerate(prompts):
        executor.submit(Request(10_000 + number, prompt, GREEDY, max_new_tokens=steps))
        while executor.has_work:
            executor.step()
            held.append(executor.runner.scratch.capacity_bytes)
    return held


def test_long_then_short(llm: LLM) -> None:
    executor, device = llm.engine.executor, llm.engine.station.device
    scratch, reclaimer = executor.runner.scratch, executor.runner.reclaimer
    assert reclaimer is not None
    floor = scratch.capacity_bytes
    assert 0 < floor == reclaimer.policy.floor_bytes
    capacities(llm, LONG, steps=2)
    high, handed_out, used = scratch.capacity_bytes, device.sample().alloc_live, device.used_bytes()
    held = [capacity for capacity in capacities(llm, SHORT, steps=5) if capacity]
    assert max(held) == high > 10 * floor
    assert floor <= held[-1] < high // 4
    assert scratch.capacity_bytes == held[-1]
    assert reclaimer.shrink_count >= 1
    assert handed_out - device.sample().alloc_live >= high - held[-1] - 1024
    assert used - device.used_bytes() >= high // 2
    assert executor.counters.to_dict()["scratch_shrink"] == reclaimer.shrink_count


def test_three_forwards_bring_it_to_their_largest_demand(llm: LLM) -> None:
    executor = llm.engine.executor
    scratch, reclaimer = executor.runner.scratch, executor.runner.reclaimer
    assert reclaimer is not None
    capacities(llm, LONG, steps=2)
    reclaimer.policy.reset()
    high, demands = scratch.capacity_bytes, list[int]()
    executor.submit(Request(20_000, SHORT, GREEDY, max_new_tokens=8))
    while executor.has_work and scratch.capacity_bytes == high:
        executor.step()
        demands.append(scratch.logical_bytes)
    counted = [demand for demand in demands[:-1] if demand]
    assert len(counted) == 2  # the third shrank, and what it asked for was forgotten with the old buffer
    assert scratch.capacity_bytes >= max(reclaimer.policy.floor_bytes, *counted)


def test_alternating_loads_do_not_oscillate(llm: LLM) -> None:
    """Whenever a long one stands among any three forwards that need scratch."""
    executor = llm.engine.executor
    steps = 1 if "latent" in llm.engine.station.model.facts.layers else 2  # latent attention needs it for prompts too
    capacities(llm, LONG, steps=steps)
    grown = executor.runner.scratch.grow_count
    capacities(llm, *[SHORT, LONG] * 4, steps=steps)
    assert executor.runner.reclaimer is not None
    assert executor.runner.reclaimer.shrink_count == 0
    assert executor.runner.scratch.grow_count == grown


def test_answers_and_reserves_are_the_same_with_and_without(folder: Path) -> None:
    prompts = [LONG, SHORT, SHORT]
    seen = []
    for reclaims in (True, False):
        with LLM(folder, reclaim_workspace=reclaims, **KNOBS) as llm:
            assert (llm.engine.executor.runner.reclaimer is not None) is reclaims
            answers = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
            ledger = llm.budget
            seen.append((answers, ledger.terms, ledger.kv_cache, ledger.unassigned_bytes))
    assert seen[0] == seen[1]


def test_the_environment_switches_it_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_RECLAIM_WORKSPACE", "0")
    with LLM(folder, **KNOBS) as llm:
        assert llm.engine.executor.runner.reclaimer is None
        assert llm.engine.executor.runner.scratch.capacity_bytes == 0
