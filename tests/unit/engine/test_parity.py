"""Greedy answers of tiny models beside those of transformers' own generate, which shares no cache code with ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoModelForCausalLM

from onebudget import LLM, SamplingParams
from onebudget.core import Request
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind

NEW_TOKENS = 12
LENGTHS = (1, 2, 5, 23, 24, 25, 33, 64, 100, 200)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
KNOBS: dict[str, Any] = {"dtype": "fp32", "device_memory": "32MiB", "max_seq_len": 256}
SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"max_num_tokens": 1024, "max_batch_size": 10},
    "chunks": {"max_num_tokens": 16},
    "few seats": {"max_num_tokens": 64, "max_batch_size": 3},
    "no chunks": {"max_num_tokens": 256, "enable_chunked_prefill": False},
    "odd blocks": {"max_num_tokens": 50, "tokens_per_block": 7},
    "one token a step": {"max_num_tokens": 1, "max_batch_size": 2},
    "no reuse": {"max_num_tokens": 64, "enable_block_reuse": False},
}


def prompts() -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(4, 260) for _ in range(length)] for length in LENGTHS]


def reference(folder: Path, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """``generate`` on one prompt after the other, without an end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def answers(tiny: Callable[[TinyKind], Path]) -> Callable[[TinyKind], list[list[int]]]:
    """What transformers answers to ``prompts()``, once a kind."""
    known: dict[TinyKind, list[list[int]]] = {}

    def answers(kind: TinyKind) -> list[list[int]]:
        if kind not in known:
            known[kind] = reference(tiny(kind), prompts())
        return known[kind]

    return answers


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_any_schedule_gives_the_answers_of_generate(
    tiny: Callable[[TinyKind], Path], answers: Callable[[TinyKind], list[list[int]]], kind: TinyKind, schedule: str
) -> None:
    with LLM(tiny(kind), **KNOBS, **SCHEDULES[schedule]) as llm:
        assert [output.token_ids for output in llm.generate(prompts(), GREEDY)] == answers(kind)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_one_by_one(
    tiny: Callable[[TinyKind], Path], answers: Callable[[TinyKind], list[list[int]]], kind: TinyKind
) -> None:
    with LLM(tiny(kind), **KNOBS, max_num_tokens=128) as llm:
        assert [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts()] == answers(kind)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_requests_that_join_at_different_steps(
    tiny: Callable[[TinyKind], Path], answers: Callable[[TinyKind], list[list[int]]], kind: TinyKind
) -> None:
    with LLM(tiny(kind), **KNOBS, max_num_tokens=40, max_batch_size=4) as llm:
        executor, waiting = llm.engine.executor, list(enumerate(prompts()))
        members: list[Request] = []
        while waiting or executor.has_work:
            for number, prompt in waiting[: len(members) % 2 + 1]:
                members.append(Request(number, prompt, GREEDY, max_new_tokens=NEW_TOKENS))
                executor.submit(members[-1])
                waiting.pop(0)
            for _ in range(3):
                executor.step()
        assert [one.output_token_ids for one in members] == answers(kind)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_prompts_that_share_their_beginning(tiny: Callable[[TinyKind], Path], kind: TinyKind) -> None:
    """Whole prompts again, prefixes at and beside the borders of blocks, and answers that became prompts."""
    numbers = random.Random(1)
    stem = [numbers.randrange(4, 260) for _ in range(100)]
    branches = [stem, stem, stem[:64], stem[:65], stem[:63], [*stem[:64], 9, 9], [*stem[:40], 7], stem[1:], stem[:96]]
    wanted = reference(tiny(kind), branches)
    with LLM(tiny(kind), **KNOBS, max_num_tokens=64, max_batch_size=3, tokens_per_block=16) as llm:
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(branches, GREEDY)] == wanted
        talk = stem[:64] + wanted[2]
        assert llm.generate(talk, GREEDY)[0].token_ids == reference(tiny(kind), [talk])[0]
        windowed = any(group.window_tokens is not None for group in llm.engine.executor.kv.groups)
        assert windowed is (kind in ("sliding", "mixed"))
        assert (llm.engine.executor.counters.reused_tokens == 0) is windowed, "a window's front is gone: no reuse"


def test_reuse_survives_eviction(tiny: Callable[[TinyKind], Path]) -> None:
    """A pool of twelve blocks and prompts that together hold far more: kept prefixes are evicted again and again."""
    numbers = random.Random(2)
    stems = [[numbers.randrange(4, 260) for _ in range(48)] for _ in range(4)]
    load = [[*stem[: numbers.randrange(8, 49)], number] for number in range(4, 16) for stem in stems]
    wanted = reference(tiny("gqa"), load, 6)
    with LLM(tiny("gqa"), **KNOBS, max_num_tokens=32, max_batch_size=3, tokens_per_block=8, kv_max_tokens=96) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        assert llm.budget.kv_cache.blocks == 12
        assert [output.token_ids for output in llm.generate(load, params)] == wanted
        assert llm.engine.executor.counters.reused_tokens > 0


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_answers_are_near_the_best(tiny: Callable[[TinyKind], Path], kind: TinyKind, dtype: str) -> None:
    """Nearly every token is the one float32 would choose after the same text. Where experts are chosen a token may go
    another way; where not, no token is further from the best than rounding explains."""
    with LLM(tiny(kind), **{**KNOBS, "dtype": dtype}, max_num_tokens=64) as llm:
        outputs = llm.generate(prompts(), GREEDY)
    model = AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)
    gaps = []
    for output in outputs:
        text = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            logits = model(text).logits[0, len(output.prompt_token_ids) - 1 : -1]
        spread = logits.std()
        gaps += ((logits.max(-1).values - logits.gather(-1, text[0, -NEW_TOKENS:, None])[:, 0]) / spread).tolist()
    assert sum(gap == 0 for gap in gaps) > 0.9 * len(gaps)
    assert kind in ("moe", "mla") or max(gaps) < 0.05


def test_a_batch_larger_than_a_step_has_tokens(tiny: Callable[[TinyKind], Path]) -> None:
    wanted = reference(tiny("gqa"), [[5], [6], [7]])
    with LLM(tiny("gqa"), **KNOBS, max_num_tokens=2, max_batch_size=8) as llm:
        assert [output.token_ids for output in llm.generate([[5], [6], [7]], GREEDY)] == wanted


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_the_smallest_engines(tiny: Callable[[TinyKind], Path], longest: int) -> None:
    knobs = {**KNOBS, "max_seq_len": longest, "max_num_tokens": 1, "max_batch_size": 1, "tokens_per_block": 1}
    with LLM(tiny("gqa"), **knobs) as llm:
        prompt = [5] * longest
        assert llm.generate(prompt, GREEDY)[0].token_ids == reference(tiny("gqa"), [prompt], 1)[0]
