"""Thousands of mixed steps: what the device holds stays what was planned, and nothing piles up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, SamplingParams
from onebudget.core import Request

KNOBS: dict[str, Any] = {
    "dtype": "fp32", "device_memory": "12MiB", "max_seq_len": 64, "max_num_tokens": 48, "tokens_per_block": 8,
    "max_batch_size": 6, "kv_max_tokens": 160, "seed": 1,
}  # fmt: skip


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 24),
        temperature=rng.choice([0.0, 0.0, 1.0]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.8]),
        ignore_eos=rng.random() < 0.5,
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


def serve(llm: LLM, steps: int) -> dict[str, int]:
    """Random requests and cancels around ``steps`` steps; how requests ended, by reason."""
    rng, executor = random.Random(3), llm.engine.executor
    reasons: dict[str, int] = {}
    inside: list[Request] = []
    number = 0
    device = llm.engine.station.device
    while executor.counters.steps < steps:
        if len(inside) < 12:
            params = params_of(rng)
            prompt = [rng.randrange(5, 300) if rng.random() < 0.3 else 7 for _ in range(rng.randint(1, 40))]
            new_tokens = min(params.max_tokens, 64 - len(prompt))
            request = Request(1000 + number, prompt, params, max_new_tokens=new_tokens, end_token_ids=frozenset([2]))
            number += 1
            inside.append(request)
            executor.submit(request)
        if rng.random() < 0.02:
            executor.cancel(rng.choice(inside))
        executor.step()
        assert device.used_bytes() <= device.total_bytes
        for request in [one for one in inside if one.finished]:
            inside.remove(request)
            reasons[request.finish_reason or ""] = reasons.get(request.finish_reason or "", 0) + 1
    for request in inside:
        executor.cancel(request)
    executor.drain()
    return reasons


@pytest.mark.long
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("overlap", [True, False])
def test_ten_thousand_mixed_steps_stay_within_the_budget(
    tiny: Callable[[str], Path], policy: str, overlap: bool
) -> None:
    check(tiny("gqa"), 10_000, scheduler_policy=policy, overlap=overlap)


def test_a_few_hundred_mixed_steps_stay_within_the_budget(tiny: Callable[[str], Path]) -> None:
    check(tiny("gqa"), 300, scheduler_policy="max_utilization")


def check(folder: Path, steps: int, **knobs: Any) -> None:
    with LLM(folder, **{**KNOBS, **knobs}, strict_memory=True) as llm:
        reasons = serve(llm, steps)
        executor, device = llm.engine.executor, llm.engine.station.device
        assert executor.last_error is None
        assert "error" not in reasons and reasons["length"] and reasons["cancelled"]
        assert executor.counters.failed_steps == 0 and executor.error_budget.left == 1.0
        assert not executor.has_work
        executor.kv.reset_reuse()
        assert executor.kv.free_blocks == executor.kv.max_resource_count()
        assert executor.slots.free_slots == executor.slots.max_resource_count()
        report = llm.memory_report()
        # Pages of buffers that came late are rounded up inside their own reserve, and measured as fragmentation.
        over = [line for line in report["lines"] if line["flag"] == "over" and line["name"] != "fragmentation"]
        assert not over
        peak = device.sample().alloc_peak
        assert peak + llm.budget.term("other_processes").bytes <= device.total_bytes
        if knobs.get("scheduler_policy") == "max_utilization":
            assert executor.counters.paused > 0
