"""A cache that is too small: what is given up, and what is found, agrees with a model of the policy block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from onebudget.config import BudgetConfig
from onebudget.core import Request
from onebudget.planner.simulate import CountedPool, RooflineClock, Simulation, Trace, TraceRequest

TraceOf = Callable[[str, int], Trace]
TOKENS_PER_BLOCK = 64
Text = Any
"""Whatever identifies the text that ends with a block."""


@dataclass
class Held:
    texts: list[Text]
    kept: int = 0
    blocks: int = 0


@dataclass
class BruteForceCache:
    """A block of a sequence that is full belongs to the text it ends. Who begins holds the blocks of its prompt, from
    the first on, that are kept; then it takes blocks as it computes tokens: unused ones first, then those kept blocks
    that nobody holds, the one let go of the longest time ago first. Letting go of a text goes from its end to its
    beginning. Full blocks are kept when the prompt is computed and when the request ends; where the same text is kept
    already the own block becomes unused.
    """

    total_blocks: int
    tokens_per_block: int
    unused_blocks: int = 0
    holders: dict[Text, int] = field(default_factory=dict)
    let_go: OrderedDict[Text, None] = field(default_factory=OrderedDict)
    hits: list[int] = field(default_factory=list)
    evicted: int = 0

    def __post_init__(self) -> None:
        self.unused_blocks = self.total_blocks

    @property
    def free_blocks(self) -> int:
        return self.unused_blocks + len(self.let_go)

    def begin(self, prompt_texts: list[Text], findable: int) -> Held:
        """``findable``: blocks that may be found, at most."""
        hits = 0
        while hits < findable and prompt_texts[hits] in self.holders:
            self._hold(prompt_texts[hits])
            hits += 1
        self.hits.append(hits)
        return Held(list(prompt_texts), kept=hits, blocks=hits)

    def _hold(self, text: Text) -> None:
        self.holders[text] += 1
        self.let_go.pop(text, None)

    def grow(self, sequence: Held, tokens: int) -> None:
        wanted = -(-tokens // self.tokens_per_block)
        while sequence.blocks < wanted:
            if self.unused_blocks:
                self.unused_blocks -= 1
            else:
                oldest, _ = self.let_go.popitem(last=False)
                del self.holders[oldest]
                self.evicted += 1
            sequence.blocks += 1

    def keep(self, sequence: Held, tokens: int, texts: list[Text]) -> None:
        """The full blocks of the first ``tokens``, whose texts are ``texts``."""
        for at in range(sequence.kept, tokens // self.tokens_per_block):
            text = texts[at]
            if text in self.holders:
                self.unused_blocks += 1
                self._hold(text)
            else:
                self.holders[text] = 1
        sequence.kept = max(sequence.kept, tokens // self.tokens_per_block)
        sequence.texts = texts

    def end(self, sequence: Held) -> None:
        self.unused_blocks += sequence.blocks - sequence.kept
        for text in reversed(sequence.texts[: sequence.kept]):
            self.holders[text] -= 1
            if not self.holders[text]:
                self.let_go[text] = None


def texts_of(number: int, traced: TraceRequest, tokens: int, size: int = TOKENS_PER_BLOCK) -> list[Any]:
    """What the full blocks of the first ``tokens`` of prompt and answer are known by."""
    ids, per_id = traced.prefix_ids or (), 512 // size
    whole = min(tokens, traced.prompt_tokens) // size
    prompt = [(ids[at // per_id], at % per_id) for at in range(whole)]
    return prompt + [("answer", number, at) for at in range(whole, tokens // size)]


def alone(trace: Trace, blocks: int, max_num_tokens: int) -> BruteForceCache:
    """Every request by itself, from the first to the last, without any part of the engine."""
    cache = BruteForceCache(blocks, TOKENS_PER_BLOCK)
    for number, traced in enumerate(trace.requests):
        prompt, size = traced.prompt_tokens, TOKENS_PER_BLOCK
        sequence = cache.begin(texts_of(number, traced, prompt), (prompt - 1) // size)
        position = sequence.blocks * size
        while position < prompt:
            chunk = prompt - position
            if chunk > max_num_tokens:
                chunk = (position + max_num_tokens) // size * size - position
            position += chunk
            cache.grow(sequence, position)
        if traced.output_tokens > 1:
            cache.keep(sequence, prompt, texts_of(number, traced, prompt))
        for tokens in range(prompt + 1, prompt + traced.output_tokens):
            cache.grow(sequence, tokens)
        computed = prompt + traced.output_tokens - 1
        cache.keep(sequence, computed, texts_of(number, traced, computed))
        cache.end(sequence)
    return cache


@pytest.mark.parametrize("share", [0.03, 0.2])
def test_one_request_at_a_time(first_of: TraceOf, clock: RooflineClock, share: float) -> None:
    trace = first_of("mooncake_conversation.jsonl", 300)
    blocks, config = sized(trace, share, max_batch_size=1, overlap=False)
    simulation = Simulation(trace, [CountedPool(blocks)], config, clock)
    while not simulation.done:
        simulation.advance()
    cache = alone(trace, blocks, config.max_num_tokens)
    assert simulation.kv.counters.reused == sum(cache.hits)
    assert simulation.kv.counters.evicted == cache.evicted > 0
    assert simulation.kv.free_blocks == cache.free_blocks == blocks


def sized(trace: Trace, share: float, **knobs: Any) -> tuple[int, BudgetConfig]:
    """A pool of a share of all blocks the trace ever takes, or the least that serves its longest request."""
    needed = [-(-(r.prompt_tokens + r.output_tokens) // TOKENS_PER_BLOCK) + 1 for r in trace.requests]
    config = BudgetConfig(
        max_seq_len=trace.longest_tokens, max_num_tokens=4096, tokens_per_block=TOKENS_PER_BLOCK, **knobs
    )
    return max(*needed, int(sum(needed) * share)), config


class Watched:
    """A simulation whose every call of the KV manager is made to the model too."""

    def __init__(self, trace: Trace, blocks: int, config: BudgetConfig, clock: RooflineClock) -> None:
        self.trace = trace
        self.simulation = Simulation(trace, [CountedPool(blocks)], config, clock)
        self.cache = BruteForceCache(blocks, config.tokens_per_block)
        self.sequences: dict[int, Held] = {}
        self.first_hits: dict[int, int] = {}
        kv: Any = self.simulation.kv
        self._begin_all, self._prepare, self._update, self._free = kv.begin_all, kv.prepare, kv.update, kv.free
        kv.begin_all, kv.prepare, kv.update, kv.free = self.begin_all, self.prepare, self.update, self.free

    def run(self) -> Any:
        while not self.simulation.done:
            self.simulation.advance()
        return self.simulation

    def texts(self, request: Request, tokens: int) -> list[Any]:
        return texts_of(request.id, self.trace.requests[request.id], tokens)

    def begin_all(self, requests: Sequence[Request]) -> list[int]:
        found: list[int] = self._begin_all(requests)
        for request, tokens in zip(requests, found, strict=True):
            texts = self.texts(request, request.context_tokens)
            sequence = self.cache.begin(texts, (request.context_tokens - 1) // TOKENS_PER_BLOCK)
            assert sequence.blocks * TOKENS_PER_BLOCK == tokens
            self.sequences[request.id] = sequence
            self.first_hits.setdefault(request.id, sequence.blocks)
        return found

    def prepare(self, batch: Any) -> None:
        positions = [(request, request.computed_tokens + request.step_tokens) for request in batch.requests]
        self._prepare(batch)
        for request, tokens in positions:
            self.cache.grow(self.sequences[request.id], tokens)
        assert self.simulation.kv.free_blocks == self.cache.free_blocks

    def update(self, batch: Any, *more: object) -> None:
        for request in batch.context_last:
            if request.begun and not request.finished:
                self.keep(request)
        self._update(batch, *more)

    def free(self, request: Request, *more: object) -> Any:
        if request.id in self.sequences:
            self.keep(request)
            self.cache.end(self.sequences.pop(request.id))
        return self._free(request, *more)

    def keep(self, request: Request) -> None:
        tokens = min(request.computed_tokens, request.total_tokens)
        self.cache.keep(self.sequences[request.id], tokens, self.texts(request, tokens))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_requests_side_by_side(first_of: TraceOf, clock: RooflineClock, policy: str, overlap: bool) -> None:
    trace = first_of("mooncake_conversation.jsonl", 300)
    blocks, config = sized(trace, 0.05, max_batch_size=32, overlap=overlap, scheduler_policy=policy)
    watched = Watched(trace, blocks, config, clock)
    simulation = watched.run()
    assert simulation.kv.counters.reused == sum(watched.cache.hits)
    assert simulation.kv.counters.evicted == watched.cache.evicted > 0
    assert simulation.kv.free_blocks == watched.cache.free_blocks == blocks
    assert not watched.sequences
    result = simulation.result()
    assert result.requests.finished == len(trace.requests)
    assert (result.steps.paused > 0) == (policy == "max_utilization")
    assert result.kv.reused_blocks == sum(watched.first_hits.values())
