"""Pools that are too small for everybody at once: requests pause, and all of them finish."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.config import BudgetConfig
from onebudget.planner.simulate import RooflineClock, SimulationResult, Trace, TraceRequest, simulate

CLOCK = RooflineClock(
    gpu="any", weight_bytes=10**9, flops_per_token=10**9, kv_bytes_per_token=1000, flops_per_attended_pair=1000,
    bandwidth_bytes_per_s=10**12, peak_flops=1e15,
)  # fmt: skip


def run(*requests: TraceRequest, blocks: int, **knobs: Any) -> SimulationResult:
    config = BudgetConfig(max_seq_len=80, tokens_per_block=4, kv_cache_manager="v2", **knobs)
    return simulate(Trace("tight", requests), kv_blocks=blocks, clock=CLOCK, config=config)


REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        arrival_s=st.just(0.0),
        prompt_tokens=st.integers(1, 30),
        output_tokens=st.integers(1, 50),
        prefix_ids=st.one_of(st.none(), st.sampled_from([(0,), (1,)])),
    ),
    min_size=3,
    max_size=14,
)


@pytest.mark.parametrize("chunked", [False, True])
@given(
    requests=REQUESTS,
    blocks=st.integers(8, 24),
    step_tokens=st.sampled_from([32, 40, 64]),
    seats=st.integers(1, 8),
    overlap=st.booleans(),
)
def test_everybody_finishes_or_is_refused_at_submission(
    chunked: bool, requests: list[TraceRequest], blocks: int, step_tokens: int, seats: int, overlap: bool
) -> None:
    result = run(
        *requests, blocks=blocks, max_num_tokens=step_tokens, max_batch_size=seats, enable_chunked_prefill=chunked,
        overlap=overlap,
    )  # fmt: skip
    assert result.requests.failed == 0
    assert result.requests.finished + result.requests.refused == len(requests)


def test_a_paused_request_comes_back_although_it_no_longer_fits_one_step() -> None:
    """Prompts of 30 tokens and answers of 40 in 18 blocks of 4: one of them pauses with more than 32 tokens."""
    requests = [TraceRequest(0.0, 30, 40), TraceRequest(0.0, 30, 40)]
    result = run(
        *requests, blocks=18, max_num_tokens=32, max_batch_size=2, enable_chunked_prefill=False,
        enable_block_reuse=False,
    )  # fmt: skip
    assert result.steps.paused >= 1
    assert result.steps.context_tokens > 2 * 30 + 32
    assert (result.requests.finished, result.requests.failed) == (2, 0)
