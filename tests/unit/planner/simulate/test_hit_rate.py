"""Hit rates against a computation that knows nothing of managers, trees or schedulers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from onebudget.config import BudgetConfig
from onebudget.planner.simulate import RooflineClock, SimulationResult, Trace, TraceRequest, simulate

UNLIMITED = 10**9
TraceOf = Callable[[str, int], Trace]


def reusable_blocks(trace: Trace, tokens_per_block: int) -> tuple[int, int]:
    """Whole blocks of all prompts that stood in an earlier one behind the same beginning, and those that did not.

    An id stands for 512 tokens behind all that came before them, so a block is known by its id and its place in it.
    The last token of a prompt is always computed.
    """
    per_id = 512 // tokens_per_block
    seen: set[tuple[int, int]] = set()
    found = missed = 0
    for request in trace.requests:
        ids = request.prefix_ids or ()
        blocks = [(ids[at // per_id], at % per_id) for at in range(request.prompt_tokens // tokens_per_block)]
        findable = blocks[: (request.prompt_tokens - 1) // tokens_per_block]
        hits = next((at for at, block in enumerate(findable) if block not in seen), len(findable))
        found += hits
        missed += -(-request.prompt_tokens // tokens_per_block) - hits
        seen.update(blocks)
    return found, missed


def replay(trace: Trace, clock: RooflineClock, blocks: int = UNLIMITED, **knobs: object) -> SimulationResult:
    config = BudgetConfig(**{"max_seq_len": trace.longest_tokens, "max_num_tokens": 8192, **knobs})
    return simulate(trace, kv_blocks=blocks, config=config, clock=clock)


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"])
@pytest.mark.parametrize("tokens_per_block", [512, 128, 32])
def test_unlimited_capacity_finds_exactly_what_is_there(
    first_of: TraceOf, clock: RooflineClock, name: str, tokens_per_block: int
) -> None:
    trace = first_of(name, 2000)
    short = replace(trace, requests=tuple(replace(request, output_tokens=2) for request in trace.requests))
    for overlap in (False, True):
        result = replay(short, clock, max_batch_size=1, tokens_per_block=tokens_per_block, overlap=overlap)
        found, missed = reusable_blocks(trace, tokens_per_block)
        assert (result.kv.reused_blocks, result.kv.missed_blocks) == (found, missed)
        assert result.kv.reused_tokens == found * tokens_per_block
        assert result.kv.hit_rate == found * tokens_per_block / sum(r.prompt_tokens for r in trace.requests)
        assert result.requests.finished == len(trace.requests)
        assert result.kv.counters["evicted"] == 0


def test_answers_are_found_by_nobody(first_of: TraceOf, clock: RooflineClock) -> None:
    trace = first_of("mooncake_conversation.jsonl", 200)
    found, _ = reusable_blocks(trace, 16)
    assert replay(trace, clock, max_batch_size=1, tokens_per_block=16).kv.reused_blocks == found


@pytest.mark.parametrize("overlap", [False, True])
def test_side_by_side_prompts_wait_for_what_is_just_being_computed(
    first_of: TraceOf, clock: RooflineClock, overlap: bool
) -> None:
    trace = first_of("mooncake_conversation.jsonl", 2000)
    result = replay(trace, clock, max_batch_size=256, tokens_per_block=512, overlap=overlap)
    assert (result.kv.reused_blocks, result.kv.missed_blocks) == reusable_blocks(trace, 512)
    assert result.steps.skipped > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_prompts_that_come_together_are_computed_once(clock: RooflineClock, overlap: bool) -> None:
    trace = Trace("equal", tuple(TraceRequest(0.0, 1000, 3, (0, 1)) for _ in range(5)))
    result = replay(trace, clock, tokens_per_block=64, overlap=overlap)
    assert result.kv.reused_blocks == 4 * (999 // 64)
    assert result.steps.context_tokens == 1000 + 4 * (1000 - 15 * 64)


def test_without_reuse_nothing_is_found(first_of: TraceOf, clock: RooflineClock) -> None:
    trace = first_of("mooncake_conversation.jsonl", 100)
    result = replay(trace, clock, enable_block_reuse=False)
    assert result.kv.hit_rate == 0
    assert result.steps.context_tokens == sum(request.prompt_tokens for request in trace.requests)
