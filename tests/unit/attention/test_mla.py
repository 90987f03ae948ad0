"""Latent attention beside the plain formula, and its declarations beside what a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from onebudget.attention import backend_for, check_kv_dtype
from onebudget.attention.gather import GatherBackend
from onebudget.attention.latent_scratch import FP8
from onebudget.attention.mla import LatentBackend
from onebudget.attention.pages import page_groups
from onebudget.budget.slopes import kv_bytes_per_token, mla_elements_per_token
from onebudget.buffers import BufferManager
from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.engine.inputs import StaticInputs
from onebudget.errors import ConfigError, ModelError
from onebudget.models.facts import ModelFacts, facts_from_config, kv_dtype_name
from onebudget.models.hooks import keep_latent
from onebudget.resources import KVCacheManager
from onebudget.resources.kv.pool import KVLayout, KVPool
from onebudget.workspace import ScratchBuffer

HEADS, RANK, ROPE, NOPE, VALUE, LAYERS = 4, 8, 4, 6, 5, 2
CACHED, KEY = RANK + ROPE, NOPE + ROPE
SCALE = 0.3
MAX_SEQ_LEN, MAX_BATCH = 64, 6


def facts(**changes: Any) -> ModelFacts:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "vocab_size": 9, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE,
    }  # fmt: skip
    return facts_from_config({**config, **changes}, name="tiny")


DEEPSEEK_V3 = facts_from_config(
    {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "vocab_size": 129280, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }
)  # fmt: skip


def random_rows(seed: int, tokens: int, width: int) -> torch.Tensor:
    """``[tokens, width]``: the same for a seed, however many of the tokens are asked for."""
    return torch.randn(2 * MAX_SEQ_LEN, width, generator=torch.Generator().manual_seed(seed))[:tokens]


@dataclass
class Bench:
    """One device with pool, inputs and backend, and sequences that walk through it step by step."""

    device: Device
    tokens_per_block: int = 4
    dtype: str = "float32"
    kv: str = "auto"
    members: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = facts()
        self.config = BudgetConfig(
            max_seq_len=MAX_SEQ_LEN, max_batch_size=MAX_BATCH, max_num_tokens=512,
            tokens_per_block=self.tokens_per_block, kv_cache_dtype=self.kv,
        )  # fmt: skip
        self.manager = BufferManager(self.device.create_stream())
        stored = kv_dtype_name(self.kv, self.dtype)
        layout = KVLayout(LAYERS, self.tokens_per_block, LatentBackend.page_parts(self.model), stored)
        self.cache = KVCacheManager(KVPool(self.manager, layout, 500 // self.tokens_per_block))
        self.scratch = ScratchBuffer(self.manager)
        self.inputs = StaticInputs(self.manager, self.config, page_groups(self.cache))
        self.backend = LatentBackend(page_groups(self.cache), self.scratch, self.model, self.dtype)
        self.weights = [
            random_rows(layer, HEADS * (NOPE + VALUE), RANK).to(self.torch_dtype) for layer in range(LAYERS)
        ]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def fixed_bytes(self) -> int:
        return LatentBackend.workspace_fixed_bytes(self.model, self.torch_dtype.itemsize, self.config)

    @property
    def rate(self) -> int:
        return LatentBackend.workspace_bytes_per_token(self.model, self.torch_dtype.itemsize)

    def close(self) -> None:
        self.inputs.release()
        self.scratch.release()
        self.cache.shutdown()

    def add(self, number: int, prompt: int) -> None:
        self.members[number] = Request(number, [1] * prompt, SamplingParams(), max_new_tokens=64)

    def batch(self, pieces: dict[int, int]) -> ScheduledBatch:
        """Prompt pieces of these sizes; every sequence whose prompt is through generates."""
        batch = ScheduledBatch()
        for number, one in self.members.items():
            if one.computed_tokens >= one.prompt_tokens:
                one.state = RequestState.GENERATION
                one.output_token_ids = [1] * (one.computed_tokens - one.prompt_tokens + 1)
                batch.add(one)
            elif size := min(pieces.get(number, 0), one.remaining_prompt_tokens):
                one.state, one.chunk_tokens = RequestState.CONTEXT, size
                batch.add(one)
        return batch

    def step(self, pieces: dict[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run one step; returns (got, wanted) ``[tokens, heads, value_dim]`` of every request and layer."""
        batch = self.batch(pieces)
        if not batch.size:
            return []
        self.cache.prepare(batch)
        self.backend.begin(self.inputs.fill(batch)[2])
        answers = []
        for layer in range(LAYERS):
            query = torch.cat([self.query(one, layer) for one in batch.requests]).transpose(0, 1)[None]
            latents = torch.cat([self.latents(one, layer)[one.computed_tokens :] for one in batch.requests])[None, None]
            output = self.backend.forward(
                layer, query, latents[..., :RANK], latents[..., RANK:],
                scale=SCALE, sliding_window=None, up_projection=self.weights[layer],
            )  # fmt: skip
            assert output.shape == (1, batch.tokens, HEADS, VALUE)
            assert output.dtype == self.torch_dtype
            start = 0
            for one in batch.requests:
                size = len(one.tokens_of_step())
                answers.append((output[0, start : start + size].double(), self.wanted(one, layer)))
                start += size
        for one in batch.requests:
            one.computed_tokens += len(one.tokens_of_step())
        return answers

    def reached(self, one: Request) -> int:
        return one.computed_tokens + len(one.tokens_of_step())

    def query(self, one: Request, layer: int) -> torch.Tensor:
        rows = random_rows(one.id * 100 + layer * 10, self.reached(one), HEADS * KEY)[one.computed_tokens :]
        return rows.view(-1, HEADS, KEY).to(self.torch_dtype)

    def latents(self, one: Request, layer: int) -> torch.Tensor:
        return random_rows(one.id * 100 + layer * 10 + 1, self.reached(one), CACHED).to(self.torch_dtype)

    def wanted(self, one: Request, layer: int, *, rounded: bool = True) -> torch.Tensor:
        """Every latent expanded, softmax over every visible key, in float64, for the tokens of this step."""
        latents = self.latents(one, layer)
        if rounded and self.kv == "fp8_e4m3":
            latents = latents.to(FP8).to(self.torch_dtype)
        compressed, rotary = latents.double().split([RANK, ROPE], 1)
        up = self.weights[layer].double().view(HEADS, NOPE + VALUE, RANK)
        expanded = compressed @ up.transpose(1, 2)
        keys = torch.cat([expanded[..., :NOPE], rotary.expand(HEADS, -1, -1)], -1)
        scores = self.query(one, layer).double().transpose(0, 1) @ keys.transpose(1, 2) * SCALE
        positions = torch.arange(self.reached(one))
        hidden = positions[None] > positions[one.computed_tokens :, None]
        attended: torch.Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ expanded[..., NOPE:]
        return attended.transpose(0, 1)

    def check(self, pieces: dict[int, int], tolerance: float = 5e-6) -> int:
        answers = self.step(pieces)
        for got, wanted in answers:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        return len(answers)


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=2**22, poison=True) as device:
        yield device


# -- the computation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_whole_prompts_then_generation(device: Device, kv: str) -> None:
    bench = Bench(device, kv=kv)
    for number, prompt in enumerate([1, 4, 7, 16]):
        bench.add(number, prompt)
    assert bench.check(dict.fromkeys(range(4), 99)) == 8
    for _ in range(6):
        assert bench.check({}) == 8


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_pieces_of_a_prompt_see_what_was_cached_before(device: Device, kv: str) -> None:
    bench = Bench(device, kv=kv)
    bench.add(0, 30)
    for size in (1, 3, 4, 7, 9, 6):
        assert bench.check({0: size}) == 2


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_pieces_of_several_prompts_and_generation_in_one_step(device: Device, kv: str) -> None:
    bench = Bench(device, kv=kv)
    bench.add(0, 3)
    bench.add(1, 9)
    bench.check({0: 3, 1: 9})
    bench.add(2, 23)
    bench.add(3, 17)
    assert bench.check({2: 5, 3: 6}) == 8
    assert bench.check({2: 1, 3: 1}) == 8  # what the gathered blocks hold beyond the prefix reaches into the next piece
    assert bench.check({2: 8, 3: 2}) == 8


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.008)])
def test_half_precision(device: Device, dtype: str, tolerance: float) -> None:
    """Within a few units in the last place of the dtype; expanding rounds twice more than plain attention."""
    bench = Bench(device, dtype=dtype)
    bench.add(0, 9)
    bench.add(1, 20)
    bench.check({0: 9, 1: 8}, tolerance)
    bench.check({1: 8}, tolerance)
    bench.check({1: 8}, tolerance)
    bench.check({}, tolerance)


@pytest.mark.parametrize(("value", "kv"), [(float("nan"), "auto"), (float("inf"), "auto"), (float("nan"), "fp8_e4m3")])
def test_slots_nobody_wrote_never_count(device: Device, value: float, kv: str) -> None:
    bench = Bench(device, kv=kv)
    for (page,) in bench.cache.pool.parts:
        page.slots.fill_(value)
    bench.scratch.require(bench.fixed_bytes // 4 * 4).view(torch.float32).fill_(value)
    bench.add(0, 5)
    bench.add(1, 14)
    bench.check({0: 5, 1: 6})
    bench.check({1: 8})
    bench.check({})


def test_fp8_latents_stay_within_the_error_that_rounding_them_can_make(device: Device) -> None:
    """E4M3 rounds to 3 bits of mantissa: every latent is off by at most 1/16 of itself (or half the smallest step).
    Pushed through the formula that bounds the values, and by e^(2d) - 1 the softmax weights, d the largest error of a
    score."""
    bench = Bench(device, kv="fp8_e4m3")
    bench.add(0, 12)
    bench.add(1, 15)
    for pieces in ({0: 12, 1: 7}, {1: 8}, {}):
        batch = bench.batch(pieces)
        bounds = [bound(bench, one, layer) for layer in range(LAYERS) for one in batch.requests]
        exact = [bench.wanted(one, layer, rounded=False) for layer in range(LAYERS) for one in batch.requests]
        errors = [(got - ideal).abs() for (got, _), ideal in zip(bench.step(pieces), exact, strict=True)]
        for error, limit in zip(errors, bounds, strict=True):
            assert (error <= limit).all()
        assert max(error.max() for error in errors) > 1e-3  # rounding did happen


def bound(bench: Bench, one: Request, layer: int) -> torch.Tensor:
    """``[tokens, heads, value_dim]``, the same for all tokens of the step: the largest error it can have."""
    latents = bench.latents(one, layer).double().abs()
    off = torch.maximum(latents / 16, torch.tensor(2.0**-10))
    up = bench.weights[layer].double().abs().view(HEADS, NOPE + VALUE, RANK)
    key_off = torch.cat([off[:, :RANK] @ up[:, :NOPE].transpose(1, 2), off[:, RANK:].expand(HEADS, -1, -1)], -1)
    query = bench.query(one, layer).double().abs().transpose(0, 1)
    score_off = (query @ key_off.transpose(1, 2) * SCALE).amax()
    values = (latents[:, :RANK] @ up[:, NOPE:].transpose(1, 2)).amax(1)
    value_off = (off[:, :RANK] @ up[:, NOPE:].transpose(1, 2)).amax(1)
    return value_off + (torch.exp(2 * score_off) - 1) * values


def test_fp8_holds_its_largest_number_where_a_latent_is_beyond_it(device: Device) -> None:
    bench = Bench(device, kv="fp8_e4m3")
    assert bench.backend._stored(torch.tensor([1e6, -500.0, 448.0])).float().tolist() == [448.0, -448.0, 448.0]


# -- the declarations ---------------------------------------------------------------------------------------------


def test_rate_is_keys_and_values_of_every_head() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 key and 128 value elements, 40 960 of them a token."""
    assert LatentBackend.workspace_bytes_per_token(DEEPSEEK_V3, 2) == 81_920
    assert LatentBackend.workspace_bytes_per_token(facts(), 4) == HEADS * (KEY + VALUE) * 4


def test_chunks_do_not_bound_it() -> None:
    assert not LatentBackend.workspace_is_chunk_bounded(DEEPSEEK_V3)


def test_gather_takes_nothing_beyond_its_fixed_area() -> None:
    assert GatherBackend.workspace_bytes_per_token(facts(), 4) == 0


def test_one_latent_a_token_is_cached() -> None:
    assert LatentBackend.page_parts(DEEPSEEK_V3) == ((576,),)


@pytest.mark.parametrize(
    ("stored", "name", "per_token"), [("bfloat16", "bf16", 70_272), ("float8_e4m3fn", "fp8_e4m3", 35_136)]
)
def test_cost_of_a_token_over_all_layers(stored: str, name: str, per_token: int) -> None:
    elements = mla_elements_per_token(layers=61, kv_lora_rank=512, qk_rope_head_dim=64)
    assert DEEPSEEK_V3.cache_cost(stored).slope == kv_bytes_per_token(elements, name) == per_token


def test_fixed_bytes_by_hand() -> None:
    """Two seats of 10 tokens in blocks of 8 are 32 rows; areas are rounded up to 64 bytes."""
    config = BudgetConfig(max_seq_len=10, max_batch_size=2, max_num_tokens=10, tokens_per_block=8)
    staged = 32 * CACHED * 4  # 1536
    absorbed = 2 * HEADS * CACHED * 4  # 384, and as much again for the kernel's result
    mask, hidden, positions = 32 * 4, 64, 16 * 8  # 32 bytes of flags fill one line of 64
    tail = (KEY - VALUE) * 4
    assert LatentBackend.workspace_fixed_bytes(facts(), 4, config) == (
        staged + 2 * absorbed + mask + hidden + positions + tail
    )
    packed = 32 * CACHED
    fp8 = config.replace(kv_cache_dtype="fp8")
    assert LatentBackend.workspace_fixed_bytes(facts(), 4, fp8) == (
        packed + staged + 2 * absorbed + mask + hidden + positions + tail
    )


@settings(max_examples=25)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=MAX_BATCH),
    steps=st.lists(st.dictionaries(st.integers(0, MAX_BATCH - 1), st.integers(1, 30), max_size=6), max_size=5),
    size=st.sampled_from([1, 3, 4, 16]),
    kv=st.sampled_from(["auto", "fp8_e4m3"]),
)
def test_any_step_takes_its_rate_and_stays_within_the_fixed_bytes_beside_it(
    prompts: list[int], steps: list[dict[int, int]], size: int, kv: str
) -> None:
    with open_device("host", capacity_bytes=2**22) as device:
        bench = Bench(device, tokens_per_block=size, kv=kv)
        for number, prompt in enumerate(prompts):
            bench.add(number, prompt)
        for pieces in [*steps, dict.fromkeys(range(MAX_BATCH), 99), {}]:
            batch = bench.batch(pieces)
            attended = sum(one.computed_tokens + one.chunk_tokens for one in batch.context)
            bench.scratch.resize(0)  # what the step itself asks for
            bench.check(pieces)
            assert attended * bench.rate <= bench.scratch.logical_bytes or not batch.size
            assert bench.scratch.logical_bytes <= attended * bench.rate + bench.fixed_bytes
        bench.close()


def test_expanded_rows_take_exactly_the_rate(device: Device) -> None:
    """Two steps that stage the same rows and differ in attended prompt tokens alone."""
    bench = Bench(device)
    taken = []
    for number, tokens in enumerate((8, 24)):
        bench.members.clear()
        bench.add(number, 24)
        bench.check({number: tokens})
        taken.append(bench.scratch.logical_bytes)
    assert taken[1] - taken[0] == 16 * bench.rate + 16 * CACHED * 4  # those tokens expanded, and staged


# -- what is refused ----------------------------------------------------------------------------------------------


def test_fp8_is_for_latent_models() -> None:
    check_kv_dtype(facts(), "fp8_e4m3")
    llama = facts_from_config(
        {
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9
        },
        name="llama",
    )  # fmt: skip
    check_kv_dtype(llama, "auto")
    with pytest.raises(ConfigError, match="only latent attention can store FP8"):
        check_kv_dtype(llama, "fp8_e4m3")


def test_latent_models_run_on_it() -> None:
    assert backend_for(DEEPSEEK_V3) is LatentBackend
    assert facts(layer_types=["full_attention"] * LAYERS).layers == ("latent",) * LAYERS


def latent_modules(layers: int = LAYERS, **attributes: Any) -> Any:
    found = [SimpleNamespace(layer_idx=layer, expand_kv=None, **attributes) for layer in range(layers)]
    return SimpleNamespace(modules=lambda: iter(found), found=found)


def test_keep_latent_gives_both_latents_back() -> None:
    model = latent_modules()
    keep_latent(model, facts())
    assert model.found[0].expand_kv("compressed", "rotary") == ("compressed", "rotary")


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        (latent_modules(indexer=object()), {}, "sparse latent attention"),
        (latent_modules(2 * LAYERS), {}, "4 latent attentions in 2 layers"),
        (latent_modules(0), {}, "0 latent attentions in 2 layers"),
        (latent_modules(), {"sliding_window": 8}, "sliding window"),
        (latent_modules(), {"v_head_dim": KEY + 1}, "wider than keys"),
        (latent_modules(), {"v_head_dim": None}, "names no head sizes"),
    ],
)
def test_other_forms_are_refused(model: Any, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        keep_latent(model, facts(**changes))
