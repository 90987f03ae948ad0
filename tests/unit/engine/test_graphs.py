"""Decode through graphs beside the eager engine: the same bits, the same tokens, the declared bytes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from onebudget import LLM, BudgetConfig, SamplingParams, StateError, UnknownKeyError
from onebudget.core import Request, RequestState, ScheduledBatch
from onebudget.device.meter import StorageMeter
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind
from onebudget.engine.graph_budget import declare_graphs
from onebudget.engine.graphs import graph_batch_sizes, padding_blocks
from onebudget.graphs.arena import ALIGNMENT_BYTES
from onebudget.graphs.keys import GraphKey
from onebudget.graphs.padding import dummy_id

Tiny = Callable[[TinyKind], Path]
KNOBS: dict[str, Any] = {
    "device_memory": "32MiB", "max_batch_size": 8, "max_seq_len": 160, "max_num_tokens": 160,
    "tokens_per_block": 8, "dtype": "fp32",
}  # fmt: skip


@contextmanager
def engines(folder: Path, **knobs: Any) -> Iterator[tuple[LLM, LLM]]:
    """One engine with graphs, one without."""
    with ExitStack() as stack:
        settings = {**KNOBS, **knobs}
        yield (
            stack.enter_context(LLM(folder, **settings)),
            stack.enter_context(LLM(folder, **settings, enable_cuda_graphs=False)),
        )


def eager_logits(llm: LLM, rows: list[Request]) -> torch.Tensor:
    """What the same rows give without a graph."""
    with torch.inference_mode():
        return llm.engine.executor.runner._eager(ScheduledBatch(generation=rows)).clone()


class Walk:
    """Generating requests that join, grow and leave, step by step."""

    def __init__(self, llm: LLM, seed: int, longest: int) -> None:
        self.llm, self.kv = llm, llm.engine.executor.kv
        self.random = random.Random(seed)
        self.longest = longest
        self.vocab = llm.engine.station.model.facts.vocab_size
        self.members: list[Request] = []
        self.number = 0

    def join(self) -> None:
        """A request behind a prompt that the engine computes in a step of its own."""
        prompt = [self.random.randrange(self.vocab) for _ in range(self.random.randint(1, 40))]
        request = Request(self.number, prompt, SamplingParams(temperature=0), max_new_tokens=self.longest)
        self.number += 1
        self.kv.begin(request)
        request.state, request.chunk_tokens = RequestState.CONTEXT, request.prompt_tokens - request.computed_tokens
        batch = ScheduledBatch(context_last=[request])
        self.kv.prepare(batch)
        with torch.inference_mode():
            logits = self.llm.engine.executor.runner._eager(batch)
        request.computed_tokens += request.chunk_tokens
        request.state = RequestState.GENERATION
        request.output_token_ids.append(int(logits[0].argmax()))
        self.members.append(request)

    def leave(self, request: Request) -> None:
        self.members.remove(request)
        self.kv.free(request)

    def change(self) -> None:
        for request in [one for one in self.members if one.total_tokens >= self.longest]:
            self.leave(request)
        if self.members and self.random.random() < 0.15:
            self.leave(self.random.choice(self.members))
        while not self.members or (len(self.members) < 8 and self.random.random() < 0.25):
            self.join()

    def step(self) -> int:
        """One decode step both ways; returns how many rows were padding."""
        self.change()
        graphs = self.llm.engine.executor.runner.graphs
        assert graphs is not None
        batch = ScheduledBatch(generation=list(self.members))
        self.kv.prepare(batch)
        key = graphs.choose(batch)
        assert key is not None
        live, rows = len(self.members), list(self.members)
        with graphs.runner.padded(rows, key):
            wanted = eager_logits(self.llm, rows)[:live]
        with torch.inference_mode():
            got = graphs.run(batch, key)
        assert torch.equal(got, wanted)
        for request, token in zip(self.members, got.argmax(-1).tolist(), strict=True):
            request.computed_tokens += 1
            request.output_token_ids.append(token)
        return key.batch_size - live


@pytest.mark.parametrize("kind", ["gqa", "mixed", "moe"])
def test_replay_equals_eager_bit_for_bit(tiny: Tiny, kind: TinyKind) -> None:
    """The same padded batch, while contexts grow and members join and leave."""
    with LLM(tiny(kind), **KNOBS) as llm:
        walk = Walk(llm, seed=3, longest=150)
        padded = [walk.step() for _ in range(60)]
        assert 0 in padded
        assert max(padded) > 0


@pytest.mark.long
@pytest.mark.demo
def test_five_hundred_steps_of_the_demo_model(demo_model: Path) -> None:
    with LLM(demo_model, device_memory="1GiB", max_seq_len=600, max_num_tokens=512, dtype="fp32") as llm:
        walk = Walk(llm, seed=5, longest=590)
        padded = [walk.step() for _ in range(500)]
        assert max(padded) > 0
        assert max(request.total_tokens for request in walk.members) > 100


PARAMS = [SamplingParams(max_tokens=6 + 7 * number, temperature=0, ignore_eos=True) for number in range(8)]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_tokens_equal_those_of_the_unpadded_eager_engine(tiny: Tiny, kind: TinyKind) -> None:
    prompts = [[4 + number] * (1 + 9 * number) for number in range(8)]
    with engines(tiny(kind)) as (graphs, eager):
        answers = [[output.token_ids for output in llm.generate(prompts, PARAMS)] for llm in (graphs, eager)]
        counters = graphs.engine.executor.counters
        assert counters.graph_hits > 30
        assert 0 < counters.graph_padded < counters.graph_hits
        assert counters.graph_eager + counters.graph_hits == counters.steps
        assert eager.engine.executor.counters.graph_hits == 0
        assert eager.engine.executor.counters.graph_eager == eager.engine.executor.counters.steps
    assert answers[0] == answers[1]


def test_the_rest_of_a_cached_prompt_runs_as_decode(tiny: Tiny) -> None:
    """A prompt of which all but one token stands in the cache is promoted: its step is a replay too."""
    prompt = list(range(4, 4 + 33))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with engines(tiny("gqa")) as (graphs, eager):
        wanted = eager.generate([prompt], params)[0].token_ids
        assert graphs.generate([prompt], params)[0].token_ids == wanted
        before = graphs.engine.executor.counters.graph_eager
        assert graphs.generate([prompt], params)[0].token_ids == wanted
        assert graphs.engine.executor.counters.graph_eager == before


def test_sampling_and_penalties_are_the_same(tiny: Tiny) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.2, top_k=7, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=15, temperature=0, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
    ]
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    with engines(tiny("gqa")) as (graphs, eager):
        ours, theirs = ([o.token_ids for o in llm.generate(prompts, params)] for llm in (graphs, eager))
        assert graphs.engine.executor.counters.graph_hits > 5
    assert ours == theirs


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_declared_before_and_measured_after(tiny: Tiny, kind: TinyKind) -> None:
    """The recording on meta tensors told every buffer to the byte, and the ledger counts them in whole pages."""
    with LLM(tiny(kind), **KNOBS) as llm:
        runner, station = llm.engine.executor.runner, llm.engine.station
        assert runner.graphs is not None
        declared = declare_graphs(tiny(kind), station.model.facts, station.model.dtype, llm.config)
        assert declared is not None
        held = sum(buffer.capacity_bytes for buffer in runner.graphs.buffers)
        # On the CPU experts run two operations more than on shapes, which can move one unit of the arena.
        unit = ALIGNMENT_BYTES if kind == "mla" else 0
        assert abs(held - sum(declared.buffer_bytes)) <= max(0.02 * held, unit)
        assert abs(runner.graphs.runner.pool_bytes - declared.pool_bytes) <= max(0.02 * declared.pool_bytes, unit)
        assert llm.budget.term("graphs").bytes == declared.physical_bytes(station.device.facts.granularity_bytes)
        measured = next(term for term in llm.memory_report()["terms"] if term["name"] == "graphs")
        assert measured["bytes"] <= llm.budget.term("graphs").bytes
        assert sorted(declared.arena_bytes) == graph_batch_sizes(llm.config)
        assert list(declared.arena_bytes.values()) == sorted(declared.arena_bytes.values())
        assert declared.capture_cost is not None
        assert (declared.capture_cost.first_bytes, declared.capture_cost.marginal_bytes) == (declared.pool_bytes, 0)
        assert str(declared.capture_cost) in llm.budget.term("graphs").why


def check_arena(llm: LLM, batch_size: int) -> None:
    """The pool against the peak of the same step run eagerly, and both against the declared bytes."""
    runner, device = llm.engine.executor.runner, llm.engine.station.device
    assert runner.graphs is not None
    dummy = runner.graphs.dummies.get()
    assert dummy is not None
    rows = [dummy] * batch_size
    with torch.no_grad():
        runner._eager(ScheduledBatch(generation=rows))  # the scratch has its size
        before = device.sample().alloc_live
        device.reset_peak()
        with StorageMeter(device):
            runner._eager(ScheduledBatch(generation=rows))
        eager_bytes = device.sample().alloc_peak - before
    arena = runner.graphs.runner.graphs[GraphKey(batch_size)].nbytes
    assert arena <= eager_bytes * 5 // 4
    assert runner.graphs.runner.pool_bytes == max(graph.nbytes for graph in runner.graphs.runner.graphs.values())
    facts, dtype = llm.engine.station.model.facts, llm.engine.station.model.dtype
    declared = declare_graphs(llm.engine.sleeper._folder, facts, dtype, llm.config)
    assert declared is not None
    assert abs(declared.arena_bytes[batch_size] - arena) <= 0.02 * arena


@pytest.mark.demo
def test_the_arena_of_the_demo_model(demo_model: Path) -> None:
    with LLM(demo_model, device_memory="1GiB", max_seq_len=512, max_num_tokens=256) as llm:
        for batch_size in (1, 4, 8):
            check_arena(llm, batch_size)


def test_pool_bytes_stay_over_a_thousand_replays_and_clear_returns_them(tiny: Tiny) -> None:
    with LLM(tiny("gqa"), **KNOBS) as llm:
        executor, device = llm.engine.executor, llm.engine.station.device
        graphs = executor.runner.graphs
        assert graphs is not None
        dummy = graphs.dummies.get()
        assert dummy is not None
        addresses = {buffer.data_ptr for buffer in graphs.buffers}
        pool, used = graphs.runner.pool_bytes, device.used_bytes()
        with torch.inference_mode():
            for _ in range(1000):
                graphs.run(ScheduledBatch(generation=[dummy] * 4), GraphKey(4))
        assert (graphs.runner.pool_bytes, device.used_bytes()) == (pool, used)
        assert {buffer.data_ptr for buffer in graphs.buffers} == addresses
        device.empty_cache()
        before = device.used_bytes()
        graphs.runner.clear()
        device.empty_cache()
        assert pool <= before - device.used_bytes() < pool + 2 * device.facts.granularity_bytes
        assert graphs.runner.pool_bytes == 0
        with pytest.raises(StateError, match="cleared"):
            graphs.runner.replay(GraphKey(4), None)


def test_graph_visible_tensors_can_not_be_replaced(tiny: Tiny) -> None:
    with LLM(tiny("gqa"), **KNOBS) as llm:
        graphs = llm.engine.executor.runner.graphs
        assert graphs is not None
        for name in ("input_ids", "position_ids", "seq_lens", "slots.0", "block_table.0"):
            with pytest.raises(StateError, match="in place"):
                graphs.static.set_static(name, graphs.static[name].clone())
        with pytest.raises(UnknownKeyError):
            graphs.runner.replay(GraphKey(3), None)


def test_the_padding_block_stands_beside_the_cache(tiny: Tiny) -> None:
    with LLM(tiny("gqa"), **KNOBS) as llm:
        kv, config = llm.engine.executor.kv, llm.config
        assert padding_blocks(graph_batch_sizes(config), config) == 1
        assert kv.max_resource_count() == llm.budget.kv_cache.blocks == kv.pool.num_blocks - 1
        assert kv.free_blocks == llm.budget.kv_cache.blocks
        assert kv.block_table(Request(dummy_id(0), [1], SamplingParams(), 1)) != []
    with LLM(tiny("gqa"), **KNOBS, cuda_graph_padding=False) as llm:
        assert llm.engine.executor.kv.pool.num_blocks == llm.budget.kv_cache.blocks


@pytest.mark.parametrize(
    ("knobs", "sizes"),
    [
        ({}, [1, 2, 4, 8]),
        ({"max_batch_size": 6}, [1, 2, 4, 6]),
        ({"max_num_tokens": 3}, [1, 2, 3]),
        ({"cuda_graph_batch_sizes": (8, 2)}, [2, 8]),
        ({"cuda_graph_batch_sizes": (64,)}, [8]),
        ({"cuda_graph_batch_sizes": (64,), "cuda_graph_padding": False}, []),
        ({"enable_cuda_graphs": False}, []),
    ],
)
def test_captured_sizes(knobs: dict[str, Any], sizes: list[int]) -> None:
    assert graph_batch_sizes(BudgetConfig(**knobs)) == sizes


def test_no_room_for_some_graphs_drops_those_and_serves_on(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """Capture stops before what the ledger keeps for others: large batches run eagerly, small ones through graphs."""
    with LLM(tiny("gqa"), **KNOBS) as llm:
        runner = llm.engine.executor.runner
        graphs = runner.graphs
        assert graphs is not None
        wanted = llm.generate([[5, 6]] * 8, PARAMS[0])
        arena = {key.batch_size: graph.nbytes for key, graph in graphs.runner.graphs.items()}
        graphs.runner.clear()
        allowance = graphs.allocated_bytes + arena[8] - 1
        with caplog.at_level(logging.WARNING), torch.inference_mode():
            captured = graphs.capture(allowance_bytes=allowance)
        assert [key.batch_size for key in captured.dropped] == [8]
        assert "batch sizes 8" in caplog.text
        assert sorted(key.batch_size for key in graphs.runner.graphs) == [1, 2, 4]
        assert graphs.allocated_bytes == allowance + 1 - arena[8] + arena[4]
        before = runner.graph_counts.hits
        answers = llm.generate([[5, 6]] * 8, PARAMS[0])
        assert [o.token_ids for o in answers] == [o.token_ids for o in wanted]
        assert runner.graph_counts.hits == before
        llm.generate([[5, 6]] * 3, PARAMS[0])
        assert runner.graph_counts.hits > before
