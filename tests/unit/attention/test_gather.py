"""Paged attention beside the plain formula, over steps that mix whole prompts, pieces and generating sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from onebudget.attention.gather import GatherBackend
from onebudget.attention.pages import page_groups
from onebudget.attention.plan import StepPlan
from onebudget.buffers import BufferManager
from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.engine.inputs import StaticInputs
from onebudget.models.facts import facts_from_config
from onebudget.resources import KVCacheManager
from onebudget.resources.kv.pool import KVLayout, KVPool
from onebudget.workspace import ScratchBuffer

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 2
SCALE = 0.3
FACTS = facts_from_config(
    {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": 9,
    }
)  # fmt: skip


def random_rows(seed: int, tokens: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """``[heads, tokens, head_dim]``: the same for a seed, however many of the tokens are asked for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, HEAD_DIM, generator=generator).transpose(0, 1).to(dtype)


class OneWindow:
    """The one group of a manager as if it gave back every block that no coming token sees: nothing may read them, so
    their numbers are replaced by 0, and the first entries count as gone."""

    def __init__(self, kv: KVCacheManager, window: int) -> None:
        self._group, self._window = page_groups(kv)[0], window
        self.layers, self.store = self._group.layers, self._group.store

    def first_block(self, request: Request) -> int:
        return max(0, request.computed_tokens + 1 - self._window) // self.store.layout.tokens_per_block

    def block_table(self, request: Request) -> list[int]:
        gone = self.first_block(request)
        return [0] * gone + self._group.block_table(request)[gone:]


@dataclass
class Bench:
    """One device with pool, inputs and backend, and sequences that walk through it step by step."""

    device: Device
    window: int | None = None
    tokens_per_block: int = 4
    dtype: str = "float32"
    blocks: int = 64
    returns: bool = False
    members: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = BudgetConfig(
            max_seq_len=64, max_batch_size=6, max_num_tokens=512, tokens_per_block=self.tokens_per_block
        )
        self.manager = BufferManager(self.device.create_stream())
        layout = KVLayout(LAYERS, self.tokens_per_block, GatherBackend.page_parts(FACTS), self.dtype)
        self.kv = KVCacheManager(KVPool(self.manager, layout, self.blocks))
        self.scratch = ScratchBuffer(self.manager)
        groups = [OneWindow(self.kv, self.window)] if self.returns and self.window else page_groups(self.kv)
        self.inputs = StaticInputs(self.manager, config, groups)
        self.backend = GatherBackend(groups, self.scratch, FACTS, self.dtype)
        self.limit_bytes = GatherBackend.workspace_fixed_bytes(FACTS, self.torch_dtype.itemsize, config)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.inputs.release()
        self.scratch.release()
        self.kv.shutdown()

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
        """Run one step; returns (got, wanted) ``[tokens, heads, head_dim]`` of every request and layer."""
        batch = self.batch(pieces)
        if not batch.size:
            return []
        self.kv.prepare(batch)
        plan: StepPlan = self.inputs.fill(batch)[2]
        self.backend.begin(plan)
        answers = []
        for layer in range(LAYERS):
            query, key, value = (self.packed(batch, layer, part) for part in range(3))
            output = self.backend.forward(layer, query, key, value, scale=SCALE, sliding_window=self.window)
            assert output.shape == (1, batch.tokens, HEADS, HEAD_DIM)
            assert output.dtype == self.torch_dtype
            start = 0
            for one in batch.requests:
                size = len(one.tokens_of_step())
                answers.append((output[0, start : start + size].double(), self.wanted(one, layer)))
                start += size
        for one in batch.requests:
            one.computed_tokens += len(one.tokens_of_step())
        return answers

    def rows(self, one: Request, layer: int, part: int, tokens: int) -> torch.Tensor:
        heads = HEADS if part == 0 else KV_HEADS
        return random_rows(one.id * 100 + layer * 10 + part, tokens, heads, self.torch_dtype)

    def packed(self, batch: ScheduledBatch, layer: int, part: int) -> torch.Tensor:
        pieces = []
        for one in batch.requests:
            reached = one.computed_tokens + len(one.tokens_of_step())
            pieces.append(self.rows(one, layer, part, reached)[:, one.computed_tokens :])
        return torch.cat(pieces, 1)[None]

    def wanted(self, one: Request, layer: int) -> torch.Tensor:
        """Softmax over every visible key, in float64, for the tokens of this step."""
        reached = one.computed_tokens + len(one.tokens_of_step())
        query, key, value = (self.rows(one, layer, part, reached).double() for part in range(3))
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (key, value))
        positions = torch.arange(reached)
        visible = positions[None] <= positions[:, None]
        if self.window is not None:
            visible &= positions[None] > positions[:, None] - self.window
        scores = (query @ key.transpose(1, 2) * SCALE).masked_fill(~visible, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(0, 1)[one.computed_tokens :]

    def check(self, pieces: dict[int, int], tolerance: float = 2e-6) -> int:
        answers = self.step(pieces)
        for got, wanted in answers:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        assert self.scratch.capacity_bytes <= self.limit_bytes
        return len(answers)


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=2**22, poison=True) as device:
        yield device


WINDOWS = [None, 1, 5, 100]


@pytest.mark.parametrize("window", WINDOWS)
def test_whole_prompts_then_generation(device: Device, window: int | None) -> None:
    bench = Bench(device, window)
    for number, prompt in enumerate([1, 4, 7, 16]):
        bench.add(number, prompt)
    assert bench.check(dict.fromkeys(range(4), 99)) == 8
    for _ in range(6):
        assert bench.check({}) == 8


@pytest.mark.parametrize("window", WINDOWS)
def test_pieces_of_a_prompt_see_what_was_cached_before(device: Device, window: int | None) -> None:
    bench = Bench(device, window)
    bench.add(0, 30)
    for size in (1, 3, 4, 7, 9, 6):
        assert bench.check({0: size}) == 2


@pytest.mark.parametrize("window", WINDOWS)
def test_pieces_and_generation_in_one_step(device: Device, window: int | None) -> None:
    bench = Bench(device, window)
    bench.add(0, 3)
    bench.add(1, 9)
    bench.check({0: 3, 1: 9})
    bench.add(2, 20)
    bench.add(3, 5)
    assert bench.check({2: 8}) == 6
    assert bench.check({2: 8, 3: 5}) == 8
    assert bench.check({2: 8}) == 8


def test_blocks_behind_the_window_are_not_read(device: Device) -> None:
    """A prompt of 40 tokens in pieces, then generation, behind a window of 5: three blocks of four at most are left."""
    bench = Bench(device, 5, returns=True)
    bench.add(0, 40)
    for size in (9, 8, 7, 6, 10):
        assert bench.check({0: size}) == 2
    bench.add(1, 3)
    bench.check({1: 3})
    bench.scratch.start_anew()
    for _ in range(9):
        assert bench.check({}) == 4
    assert bench.scratch.peak_bytes <= 2 * 3 * 4 * 2 * KV_HEADS * HEAD_DIM * 4


def test_one_sequence_alone_needs_no_mask(device: Device) -> None:
    bench = Bench(device)
    bench.add(0, 5)
    bench.check({0: 5})
    for _ in range(8):
        bench.check({})
    assert bench.scratch.capacity_bytes <= 4 * 4 * 2 * KV_HEADS * HEAD_DIM * 4


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_half_precision(device: Device, dtype: str, tolerance: float) -> None:
    """Within a few units in the last place of the dtype: eight bits of mantissa, or eleven."""
    bench = Bench(device, None, dtype=dtype)
    bench.add(0, 9)
    bench.add(1, 20)
    bench.check({0: 9, 1: 8}, tolerance)
    bench.check({1: 8}, tolerance)
    bench.check({1: 8}, tolerance)
    bench.check({}, tolerance)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_slots_nobody_wrote_never_count(device: Device, value: float) -> None:
    """Memory of a pool starts with whatever was there; a masked slot has to stay out even if it holds no number."""
    bench = Bench(device)
    for parts in bench.kv.pool.parts:
        for page in parts:
            page.slots.fill_(value)
    bench.scratch.require(bench.limit_bytes).view(torch.float32).fill_(value)
    bench.add(0, 5)
    bench.add(1, 14)
    bench.check({0: 5, 1: 6})
    bench.check({1: 8})
    bench.check({})


@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    steps=st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 9), max_size=5), min_size=1, max_size=6),
    window=st.sampled_from(WINDOWS),
    size=st.sampled_from([1, 3, 4, 16]),
    returns=st.booleans(),
)
def test_any_mix(prompts: list[int], steps: list[dict[int, int]], window: int | None, size: int, returns: bool) -> None:
    with open_device("host", capacity_bytes=2**22, poison=True) as device:
        bench = Bench(device, window, tokens_per_block=size, blocks=160, returns=returns)
        for number, prompt in enumerate(prompts):
            bench.add(number, prompt)
        for pieces in steps:
            bench.check(pieces)
        bench.close()
        assert device.sample().alloc_live == 0


def test_the_declared_workspace_is_what_the_largest_step_takes(device: Device) -> None:
    """Six sequences as long as allowed: the staging area is used to the byte."""
    bench = Bench(device, blocks=96)
    for number in range(6):
        bench.add(number, 63)
    bench.check(dict.fromkeys(range(6), 63))
    assert bench.scratch.peak_bytes == 0
    bench.check({})
    assert bench.scratch.peak_bytes == bench.limit_bytes == 6 * 64 * 2 * KV_HEADS * HEAD_DIM * 4


def test_declared_bytes_are_whole_blocks_of_k_and_v_of_one_layer() -> None:
    config = BudgetConfig(max_seq_len=33, max_batch_size=3, tokens_per_block=32)
    assert GatherBackend.workspace_fixed_bytes(FACTS, 2, config) == 3 * 64 * 2 * KV_HEADS * HEAD_DIM * 2
