"""The demo model beside transformers' own generate, and under a strict budget."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoModelForCausalLM

from onebudget import LLM, SamplingParams
from onebudget.core import Request, RequestOutput
from onebudget.models.demo import demo_prompts

pytestmark = pytest.mark.demo

NEW_TOKENS = 12
LENGTHS = (1, 2, 17, 32, 33, 64, 150, 600)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
KNOBS: dict[str, Any] = {"dtype": "fp32", "device_memory": "1GiB", "max_seq_len": 640}


def prompts() -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 49_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    """One prompt after the other, greedy, without an end token."""
    answers = []
    for prompt in prompts():
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def chunked(demo_model: Path) -> Iterator[LLM]:
    """Steps of 64 tokens: most prompts come in pieces, beside others that generate."""
    with LLM(demo_model, **KNOBS, max_num_tokens=64, enable_block_reuse=False) as llm:
        yield llm


def test_together_in_pieces(chunked: LLM, wanted: list[list[int]]) -> None:
    assert [output.token_ids for output in chunked.generate(prompts(), GREEDY)] == wanted
    assert chunked.engine.executor.counters.steps > 900 // 64


def test_one_by_one(chunked: LLM, wanted: list[list[int]]) -> None:
    assert [chunked.generate(prompt, GREEDY)[0].token_ids for prompt in prompts()] == wanted


def test_joining_at_different_steps(chunked: LLM, wanted: list[list[int]]) -> None:
    executor = chunked.engine.executor
    waiting = [
        Request(-number, prompt, GREEDY, max_new_tokens=NEW_TOKENS) for number, prompt in enumerate(prompts()[:-1], 1)
    ]
    members = list(waiting)
    while waiting or executor.has_work:
        if waiting:
            executor.submit(waiting.pop())
        for _ in range(2):
            executor.step()
    assert [one.output_token_ids for one in members] == wanted[:-1]


def test_whole_prompts_only(demo_model: Path, wanted: list[list[int]]) -> None:
    with LLM(demo_model, **KNOBS, max_num_tokens=600, enable_chunked_prefill=False) as llm:
        assert [output.token_ids for output in llm.generate(prompts(), GREEDY)] == wanted
        assert llm.generate(prompts()[-1], GREEDY)[0].token_ids == wanted[-1]
        assert llm.engine.executor.counters.reused_tokens == 599


def test_bfloat16_is_the_same_model(demo_model: Path, model: Any) -> None:
    """On texts the model knows how to go on with, nearly every token is the one float32 would choose."""
    asked = [prompt.text for prompt in demo_prompts()]
    with LLM(demo_model, **{**KNOBS, "dtype": "bf16"}, max_num_tokens=64) as llm:
        outputs = llm.generate(asked, GREEDY)
    same = 0
    for output in outputs:
        text = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            logits = model(text).logits[0, len(output.prompt_token_ids) - 1 : -1]
        same += int((logits.argmax(-1) == text[0, -NEW_TOKENS:]).sum())
    assert same >= 0.9 * NEW_TOKENS * len(asked)


# -- the budget holds ---------------------------------------------------------------------------------------------


def serve(llm: LLM, requests: int, long_ones: int) -> list[RequestOutput]:
    """``long_ones`` prompts up to the longest, the rest short. Some are sampled; one wants penalties, and the last one,
    when everything else has grown, the log-probabilities of its prompt."""
    numbers, longest = random.Random(7), llm.config.max_seq_len
    lengths = [longest - 30, *(numbers.randint(1, longest) for _ in range(long_ones - 2))]
    lengths += [numbers.randint(1, 40) for _ in range(requests - long_ones)]
    lengths.append(longest)
    params = [
        SamplingParams(
            max_tokens=numbers.randint(2, 8), temperature=numbers.choice([0, 0.8]), top_k=numbers.choice([0, 40]),
            top_p=numbers.choice([1.0, 0.9]), seed=number, ignore_eos=True,
            frequency_penalty=0.5 if number == 3 else 0.0, prompt_ignore_length=1 if number == 3 else 0,
            prompt_logprobs=0 if number == requests - 1 else None,
        )
        for number in range(requests)
    ]  # fmt: skip
    outputs: list[RequestOutput] = llm.generate(
        [[numbers.randrange(3, 49_000) for _ in range(n)] for n in lengths], params
    )
    return outputs


def check_budget(llm: LLM) -> None:
    """Nothing beyond the plan, and no more planned than was needed."""
    ledger, report = llm.budget, llm.memory_report()
    slack = {"fraction_slack", "safety_margin"}
    useful = ledger.kv_cache.bytes + sum(term.bytes for term in ledger.terms if term.name not in slack)
    assert useful >= 0.97 * ledger.capacity_bytes
    assert report["peak_bytes"] <= ledger.capacity_bytes
    peaks = {term["name"]: term["peak_bytes"] for term in report["terms"]}
    for term in ledger.terms:
        if term.name not in slack:
            print(f"{term.name}: {peaks.get(term.name, 0)} of {term.bytes}")
            assert peaks.get(term.name, 0) >= 0.8 * term.bytes, term.name
    for name in ("weights", "fixed_workspace"):
        assert peaks[name] <= ledger.term(name).bytes, name


@pytest.mark.parametrize(
    ("requests", "long_ones", "step_tokens"),
    [(40, 3, 128), pytest.param(200, 200, 2048, marks=pytest.mark.long)],
)
def test_no_step_fails_on_a_card_without_slack(
    demo_model: Path, requests: int, long_ones: int, step_tokens: int
) -> None:
    knobs = {"device_memory": "1GiB", "max_seq_len": 512, "dtype": "fp32", "max_num_tokens": step_tokens}
    # Scratch that stays and is used by every step: otherwise peaks of different steps are never there together.
    plain = {"reclaim_workspace": False, "enable_cuda_graphs": False}
    with LLM(demo_model, **knobs, **plain, free_gpu_memory_fraction=1.0, strict_memory=True) as llm:
        outputs = serve(llm, requests, long_ones)
        assert {(output.finish_reason, output.error) for output in outputs} == {("length", None)}
        assert llm.engine.executor.counters.failed_steps == 0
        check_budget(llm)
