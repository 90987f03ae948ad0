"""Both loops with a model behind them give the same answers, whatever the requests ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, RequestOutput, SamplingParams

KNOBS: dict[str, Any] = {
    "dtype": "fp32", "device_memory": "16MiB", "max_seq_len": 64, "max_num_tokens": 32, "tokens_per_block": 8,
    "max_batch_size": 4, "seed": 5,
}  # fmt: skip
SHARED = list(range(20, 41))
PROMPTS = [SHARED[: 3 + 2 * number] + [50 + number] * (number % 4) for number in range(10)]
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "end tokens": replace(GREEDY, ignore_eos=False, stop_token_ids=tuple(range(40, 90))),
    "seeded": SamplingParams(max_tokens=9, seed=3, top_k=40, top_p=0.9, ignore_eos=True),
    "engine's seed": SamplingParams(max_tokens=9, ignore_eos=True),
    "barred ends": SamplingParams(max_tokens=9, temperature=0, min_tokens=4, stop_token_ids=tuple(range(200))),
    "penalties": SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, repetition_penalty=1.8,
                                presence_penalty=0.4, frequency_penalty=0.7, prompt_ignore_length=2),
    "log-probabilities": replace(GREEDY, logprobs=3, prompt_logprobs=2),
}  # fmt: skip


def answers(folder: Path, params: list[SamplingParams], **knobs: Any) -> list[RequestOutput]:
    with LLM(folder, **{**KNOBS, **knobs}) as llm:
        return llm.generate(PROMPTS, params)


def said(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.text, one.finish_reason) for one in outputs]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("gqa")


@pytest.mark.parametrize("kind", KINDS)
def test_same_answers_for_each_kind_of_request(folder: Path, kind: str) -> None:
    params = [KINDS[kind]] * len(PROMPTS)
    overlapped, plain = answers(folder, params), answers(folder, params, overlap=False)
    assert said(overlapped) == said(plain)
    if kind == "log-probabilities":
        for one, other in zip(overlapped, plain, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert [entry.token_id for entry in one.logprobs] == one.token_ids
            assert [entry.logprob for entry in one.logprobs] == pytest.approx(
                [e.logprob for e in other.logprobs], abs=1e-4
            )
            assert len(one.prompt_logprobs or ()) == len(one.prompt_token_ids)


def test_same_answers_in_mixed_company(folder: Path) -> None:
    params = [KINDS[list(KINDS)[number % len(KINDS)]] for number in range(len(PROMPTS))]
    wanted = said(answers(folder, params, overlap=False))
    for knobs in (
        {}, {"enable_block_reuse": False}, {"max_batch_size": 2}, {"max_num_tokens": 16},
        {"scheduler_policy": "static_batch"}, {"max_num_tokens": 64, "enable_chunked_prefill": False},
    ):  # fmt: skip
        assert said(answers(folder, params, **knobs)) == wanted, knobs


def test_a_pool_that_is_too_small_for_all_pauses_and_says_the_same(folder: Path) -> None:
    params = [KINDS[list(KINDS)[number % len(KINDS)]] for number in range(len(PROMPTS))]
    wanted = said(answers(folder, params, overlap=False))
    for overlap in (True, False):
        for reuse in (True, False):
            with LLM(
                folder, **{**KNOBS, "overlap": overlap}, scheduler_policy="max_utilization", kv_max_tokens=56,
                enable_block_reuse=reuse,
            ) as llm:  # fmt: skip
                assert said(llm.generate(PROMPTS, params)) == wanted, (overlap, reuse)
                assert llm.engine.executor.counters.paused > 0


def test_a_cache_that_suspends_says_the_same(folder: Path) -> None:
    params = [KINDS[list(KINDS)[number % len(KINDS)]] for number in range(len(PROMPTS))]
    wanted = said(answers(folder, params, overlap=False))
    for overlap in (True, False):
        with LLM(folder, **{**KNOBS, "overlap": overlap}, kv_cache_manager="v2", kv_max_tokens=64) as llm:
            assert said(llm.generate(PROMPTS, params)) == wanted, overlap
            counters = llm.engine.executor.counters
            assert counters.paused > 0 and counters.resumed > 0


def test_stop_texts_found_late_cut_the_answer_at_the_same_place(folder: Path) -> None:
    whole = answers(folder, [GREEDY] * len(PROMPTS), overlap=False)
    params = [replace(GREEDY, stop=(one.text[len(one.text) // 2 :][:3] or "x",)) for one in whole]
    assert said(answers(folder, params)) == said(answers(folder, params, overlap=False))


def test_streams_give_the_same_text(folder: Path) -> None:
    with LLM(folder, **KNOBS) as llm:
        whole = said(llm.generate(PROMPTS, GREEDY))
        texts: dict[int, str] = {}
        last = {}
        for chunk in llm.stream(PROMPTS, GREEDY):
            texts[chunk.request_id] = texts.get(chunk.request_id, "") + chunk.text
            last[chunk.request_id] = chunk.output
        assert [text for _, text in sorted(texts.items())] == [text for _, text, _ in whole]
        assert all(output is not None for output in last.values())
