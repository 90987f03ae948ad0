"""Rank 0 of a helix group through scheduler and step loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebudget.config import BudgetConfig
from onebudget.errors import ConfigError
from onebudget.planner.simulate import (
    CountedPool,
    RooflineClock,
    Simulation,
    SimulationResult,
    Trace,
    TraceRequest,
    simulate,
)

SIZE = 4
CLOCK = RooflineClock(
    gpu="custom", weight_bytes=10**9, flops_per_token=10**9, kv_bytes_per_token=1000, flops_per_attended_pair=1000,
    bandwidth_bytes_per_s=10**12, peak_flops=10**14,
)  # fmt: skip


def settings_of(**knobs: Any) -> BudgetConfig:
    return BudgetConfig(**{"max_seq_len": 200, "tokens_per_block": SIZE, "max_num_tokens": 64, **knobs})


def run(*requests: tuple[int, int], blocks: int, cp_size: int, **knobs: Any) -> SimulationResult:
    trace = Trace("few", tuple(TraceRequest(0.0, prompt, new) for prompt, new in requests))
    return simulate(trace, kv_blocks=blocks, clock=CLOCK, config=settings_of(**knobs), cp_size=cp_size)


def test_two_ranks_serve_at_once_what_one_serves_in_turn() -> None:
    """Each request is 8 blocks in all: 4 on the first of two ranks."""
    requests = [(16, 16)] * 2
    alone = run(*requests, blocks=8, cp_size=1, kv_cache_manager="v2")
    shared = run(*requests, blocks=8, cp_size=2)
    assert alone.requests.finished == shared.requests.finished == 2
    assert (alone.steps.paused, shared.steps.paused) == (1, 0)
    assert shared.kv.peak_used_blocks == 8
    assert shared.batch_size_histogram == {2: 15}


def test_a_full_pool_does_not_stop_tokens_of_the_other_rank() -> None:
    """After the first steps two prompts of 6 blocks hold the 4 blocks of rank 0; the next tokens are rank 1's."""
    result = run((24, 2), (24, 2), blocks=4, cp_size=2, max_num_tokens=12, overlap=False)
    assert (result.requests.finished, result.requests.failed) == (2, 0)


def test_what_no_rank_could_keep_is_refused() -> None:
    result = run((16, 16), (16, 17), blocks=4, cp_size=2)
    assert (result.requests.finished, result.requests.refused) == (1, 1)


def test_the_settings_of_a_rank_are_stated() -> None:
    result = run((16, 16), blocks=8, cp_size=3)
    assert {name: result.settings[name] for name in ("kv_cache_manager", "enable_block_reuse", "cp_size")} == {
        "kv_cache_manager": "v2", "enable_block_reuse": False, "cp_size": 3,
    }  # fmt: skip
    assert "rank 0 of 3 ranks" in result.notes[0]
    assert "cp_size" not in run((16, 16), blocks=8, cp_size=1).settings


def test_what_helix_can_not_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="'v2' under helix"):
        run((16, 16), blocks=8, cp_size=2, kv_cache_manager="v1")
    with pytest.raises(ConfigError, match="cp_size = 0"):
        run((16, 16), blocks=8, cp_size=0)
    trace = Trace("one", (TraceRequest(0.0, 16, 16),))
    with pytest.raises(ConfigError, match="windows of 32 tokens"):
        simulate(trace, kv_blocks=[CountedPool(50), CountedPool(90, 32)], clock=CLOCK, config=settings_of(), cp_size=2)


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    blocks=st.integers(2, 16),
    cp_size=st.integers(2, 4),
    max_num_tokens=st.integers(4, 40),
    overlap=st.booleans(),
)
def test_whoever_is_not_refused_gets_all_tokens_however_small_the_pool(
    requests: list[tuple[int, int, int]], blocks: int, cp_size: int, max_num_tokens: int, overlap: bool
) -> None:
    """Those who are paused begin again, and no step is promised blocks that are not there."""
    trace = Trace("random", tuple(TraceRequest(at / 1000, prompt, new) for at, prompt, new in sorted(requests)))
    config = settings_of(max_num_tokens=max_num_tokens, max_batch_size=4, overlap=overlap)
    simulation = Simulation(trace, [CountedPool(blocks)], config, CLOCK, cp_size=cp_size)
    while not simulation.done:
        simulation.advance()
    counts = simulation.result().requests
    assert counts.failed == 0
    assert counts.finished + counts.refused == counts.submitted
    assert simulation.kv.free_blocks == blocks
