from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
import transformers

from onebudget import LLM, SamplingParams
from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestOutput, ScheduledBatch
from onebudget.devtools.tiny_models import TinyKind, tiny_model
from onebudget.engine.logprobs import (
    layers_once,
    log_probabilities,
    prompt_pieces,
    prompt_rows_at_once,
    token_logprobs,
)

CLOSE = 1e-4


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_log_softmax_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 50) * 9).to(dtype)
    exact = torch.log_softmax(logits.double(), -1)
    logprobs = log_probabilities(logits)
    assert logprobs.dtype == torch.float32
    entries = token_logprobs(logprobs, [4, 49, 0], [0, 3, 50])
    for row, (entry, token, count) in enumerate(zip(entries, [4, 49, 0], [0, 3, 50], strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(exact[row, token].item(), abs=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row, token]).sum())
        assert len(entry.top) == count
        for (found, logprob), other in zip(entry.top, entry.top[1:], strict=False):
            assert logprob >= other[1]
            assert logprob == pytest.approx(exact[row, found].item(), abs=1e-5)
    assert math.fsum(math.exp(logprob) for _, logprob in entries[2].top) == pytest.approx(1.0, abs=1e-5)


def test_more_alternatives_than_tokens() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 3), [1], [20])
    assert len(entry.top) == 3
    assert entry.rank == 1


def test_rows_without_contents_have_none() -> None:
    assert token_logprobs(torch.zeros(2, 5, device="meta"), [1, 1], [2, 2]) == []


# -- which rows of a step -----------------------------------------------------------------------------------------


def request(number: int, prompt: int, *, computed: int = 0, chunk: int = 0, **params: Any) -> Request:
    one = Request(number, list(range(prompt)), SamplingParams(**params), max_new_tokens=9)
    one.computed_tokens, one.chunk_tokens = computed, chunk
    return one


def test_pieces_are_the_rows_that_predict_a_prompt_token() -> None:
    batch = ScheduledBatch()
    chunked = request(0, 30, computed=4, chunk=10, prompt_logprobs=1)
    batch.add(chunked)
    batch.add(request(1, 7, chunk=7))
    last = request(2, 9, computed=2, chunk=7, prompt_logprobs=0)
    batch.add(last)
    batch.add(request(3, 1, chunk=1, prompt_logprobs=0))
    batch.add(request(4, 3, computed=2, chunk=1, prompt_logprobs=0))
    pieces = [(piece.request.id, piece.first_row, piece.rows, piece.position) for piece in prompt_pieces(batch, 4)]
    assert pieces == [(0, 0, 4, 5), (0, 4, 4, 9), (0, 8, 2, 13), (2, 17, 4, 3), (2, 21, 2, 7)]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=5),
    tokens=st.integers(1, 16),
    rows_at_once=st.integers(1, 8),
)
def test_over_all_steps_every_prompt_token_but_the_first_is_predicted_once(
    prompts: list[tuple[int, bool]], tokens: int, rows_at_once: int
) -> None:
    members = [
        request(number, length, prompt_logprobs=0 if asks else None) for number, (length, asks) in enumerate(prompts)
    ]
    seen: dict[int, list[int]] = {one.id: [] for one in members}
    while any(one.remaining_prompt_tokens for one in members):
        batch, left = ScheduledBatch(), tokens
        for one in members:
            one.chunk_tokens = min(one.remaining_prompt_tokens, left)
            left -= one.chunk_tokens
            if one.chunk_tokens:
                batch.add(one)
        # The packed order: chunks first, then prompts that end.
        packed = [(one.id, one.computed_tokens + place) for one in batch.context for place in range(one.chunk_tokens)]
        for piece in prompt_pieces(batch, rows_at_once):
            assert 0 < piece.rows <= rows_at_once
            for place in range(piece.rows):
                assert packed[piece.first_row + place] == (piece.request.id, piece.position + place - 1)
                seen[piece.request.id].append(piece.position + place)
        for one in members:
            one.computed_tokens += one.chunk_tokens
            one.chunk_tokens = 0
    for one, (length, asks) in zip(members, prompts, strict=True):
        assert seen[one.id] == (list(range(1, length)) if asks else [])


def test_a_step_that_is_tried_again_writes_the_same_places() -> None:
    one = request(0, 5, chunk=3, prompt_logprobs=1)
    batch = ScheduledBatch()
    batch.add(one)
    for _ in range(2):
        for piece in prompt_pieces(batch, 2):
            piece.take(torch.zeros(piece.rows, 8))
    assert one.prompt_logprobs[0] is None
    assert [entry.token_id for entry in one.prompt_logprobs[1:] if entry] == [1, 2, 3]


@pytest.mark.parametrize(
    ("knobs", "rows"),
    [
        ({}, 64),
        ({"max_num_tokens": 64}, 63),
        ({"max_num_tokens": 1}, 1),
        ({"max_seq_len": 20, "max_num_tokens": 100}, 18),
        ({"max_seq_len": 1}, 1),
    ],
)
def test_rows_at_once_are_what_one_dummy_can_show(knobs: dict[str, Any], rows: int) -> None:
    assert prompt_rows_at_once(BudgetConfig(**knobs)) == rows


# -- the head of any model ----------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
HEADS: dict[str, Callable[[], Any]] = {
    "plain": lambda: transformers.LlamaConfig(**SMALL),
    "soft cap": lambda: transformers.Gemma2Config(**SMALL, final_logit_softcapping=0.5),
    "scaled up": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.06),
    "scaled down": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=7.0),
    "router": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=2),
    "bias and dense": lambda: transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 2}),
    "other prefix": lambda: transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "past the base model": lambda: transformers.OPTConfig(
        vocab_size=60, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=12,
        max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_pieces_of_the_head_are_the_rows_of_the_whole(name: str) -> None:
    """Scaling, capping and biases included; the layers run once wherever the model calls them by their prefix."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(HEADS[name](), attn_implementation="eager").eval()
    ids, layers = torch.arange(20)[None], getattr(module, module.base_model_prefix)
    runs: list[int] = []
    (layers.decoder if name == "past the base model" else layers).register_forward_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        whole = module(input_ids=ids, use_cache=False).logits[0]
        runs.clear()
        with layers_once(module):
            pieces = [
                module(input_ids=ids, use_cache=False, logits_to_keep=torch.arange(*piece)).logits[0]
                for piece in ((0, 0), (0, 7), (7, 14), (14, 20))
            ]
    assert pieces[0].shape == (0, 60)
    assert torch.allclose(torch.cat(pieces), whole, atol=1e-6)
    assert len(runs) == (4 if name == "past the base model" else 1)
    assert getattr(module, module.base_model_prefix) is layers
    assert {key for key, _ in module.named_parameters()} == {
        key for key, _ in type(module)(module.config).named_parameters()
    }


def test_layers_stand_in_their_place_again_after_a_failure() -> None:
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    layers = module.model
    with pytest.raises(ValueError, match="exactly one"), layers_once(module):
        module()
    assert module.model is layers


# -- in the engine ------------------------------------------------------------------------------------------------

PROMPTS = [
    [(7 * place + 3 * number) % 250 + 4 for place in range(length)] for number, length in enumerate((1, 2, 50, 90))
]


def assert_equal_to_transformers(outputs: list[RequestOutput], folder: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for output in outputs:
        ids, length = torch.tensor([output.prompt_token_ids + output.token_ids]), len(output.prompt_token_ids)
        with torch.no_grad():
            rows = torch.log_softmax(reference(ids).logits[0].float(), -1)
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        assert (len(output.prompt_logprobs), len(output.logprobs)) == (length, len(output.token_ids))
        assert output.prompt_logprobs[0] is None
        for place, entry in enumerate([*output.prompt_logprobs[1:], *output.logprobs]):
            assert entry is not None
            assert entry.token_id == ids[0, place + 1]
            assert entry.logprob == pytest.approx(rows[place, entry.token_id].item(), abs=CLOSE)
            values = rows[place].topk(3).values.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(values, abs=CLOSE)
            for token, logprob in entry.top:
                assert logprob == pytest.approx(rows[place, token].item(), abs=CLOSE)


@pytest.mark.parametrize("kind", ["gqa", "sliding", "mixed", "moe", "mla"])
def test_equal_to_transformers_on_every_kind(kind: TinyKind, tiny: Callable[[TinyKind], Path]) -> None:
    """Prompts in chunks beside requests that generate, under strict memory."""
    folder = tiny(kind)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with LLM(
        folder, dtype="fp32", device_memory="32MiB", max_seq_len=128, max_num_tokens=40, strict_memory=True
    ) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert_equal_to_transformers(outputs, folder)


def test_capped_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_model("mixed", tmp_path, final_logit_softcapping=2.0)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with LLM(folder, dtype="fp32", device_memory="32MiB", max_seq_len=128, max_num_tokens=40) as llm:
        assert_equal_to_transformers(llm.generate(PROMPTS[:3], params), folder)


@pytest.fixture(scope="module")
def llm(tiny: Callable[[TinyKind], Path]) -> Iterator[LLM]:
    with LLM(tiny("gqa"), dtype="fp32", device_memory="32MiB", max_seq_len=128, max_num_tokens=64) as made:
        yield made


def test_a_prompt_that_stands_in_the_cache_is_computed_again(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate([PROMPTS[3]], plain)
    before = llm.engine.executor.scheduler.reused_tokens
    llm.generate([PROMPTS[3]], plain)
    assert llm.engine.executor.scheduler.reused_tokens > before, "without log-probabilities it is reused"
    reused = llm.engine.executor.scheduler.reused_tokens
    (output,) = llm.generate([PROMPTS[3]], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    assert llm.engine.executor.scheduler.reused_tokens == reused
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPTS[3])
    assert None not in output.prompt_logprobs[1:]


def test_neither_penalties_nor_temperature_change_them(llm: LLM) -> None:
    """And a token chosen against the model's favour has its true rank."""
    options: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, "logprobs": 2}
    plain, warm, penalised = (
        llm.generate([PROMPTS[2]], SamplingParams(**options, **more))[0]
        for more in (
            {"temperature": 0},
            {"temperature": 5.0, "seed": 3, "top_k": 200},
            {"temperature": 0, "frequency_penalty": 50.0, "min_tokens": 1, "repetition_penalty": 9.0},
        )
    )
    entries = [output.logprobs[0] for output in (plain, warm, penalised) if output.logprobs]
    for entry in entries[1:]:  # behind a reused prefix sums are rounded in another order
        assert [token for token, _ in entry.top] == [token for token, _ in entries[0].top]
        assert [logprob for _, logprob in entry.top] == pytest.approx([logprob for _, logprob in entries[0].top])
    assert (entries[0].rank, entries[0].logprob) == (1, entries[0].top[0][1])
    assert entries[1].rank > 1


def test_only_who_asks_gets_them(llm: LLM) -> None:
    asked, not_asked = llm.generate(
        PROMPTS[1:3], [SamplingParams(max_tokens=2, temperature=0, logprobs=0), SamplingParams(max_tokens=2)]
    )
    assert asked.logprobs is not None
    assert asked.logprobs[0].top == ()
    assert asked.prompt_logprobs is not_asked.logprobs is not_asked.prompt_logprobs is None
    assert "prompt_logprobs" not in asked.to_dict()


@pytest.mark.demo
def test_the_demo_model_in_float32(demo_model: Path) -> None:
    text = "The lighthouse keeper wrote in his book that the sea was calm, and " * 8
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with LLM(demo_model, dtype="fp32", device_memory="768MiB", max_num_tokens=128, max_seq_len=256) as llm:
        assert_equal_to_transformers(llm.generate([text], params), demo_model)


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reserve_is_what_the_largest_step_rises_above_the_peak(dtype: str, tmp_path: Path) -> None:
    """A step full of prompt rows, on a wide vocabulary: planned and measured agree to within small index tensors."""
    folder = tiny_model("gqa", tmp_path, vocab_size=8192, hidden_size=32)
    with LLM(
        folder, dtype=dtype, device_memory="24MiB", max_num_tokens=128, max_seq_len=128, max_batch_size=2,
        free_gpu_memory_fraction=1.0, strict_memory=True,
    ) as llm:  # fmt: skip
        planned = llm.budget.term("logits").bytes
        assert planned < 64 * 8192 * (4 + 4), "float32 rows and their log-probabilities"
        (output,) = llm.generate([list(range(128))], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20))
        assert output.error is None
        measured = {entry["name"]: entry["peak_bytes"] for entry in llm.memory_report()["terms"]}["logits"]
    assert 0 <= planned - measured < 0.01 * planned


def test_where_the_peak_covers_the_rows_nothing_is_reserved(tmp_path: Path) -> None:
    folder = tiny_model("gqa", tmp_path)
    with LLM(folder, dtype="fp32", device_memory="32MiB", max_num_tokens=512, max_seq_len=512) as llm:
        assert llm.budget.term("logits").bytes == 0
