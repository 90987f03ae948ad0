from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from onebudget.config import BudgetConfig
from onebudget.errors import ConfigError
from onebudget.planner.simulate import (
    CountedPool,
    RooflineClock,
    SimulationResult,
    StepWork,
    SyntheticLoad,
    Trace,
    TraceRequest,
    simulate,
    synthetic_trace,
)


class Seconds:
    """A clock of whole seconds: the host needs one per step, the card two, and one more per 100 context tokens
    or per 1,000 bytes copied."""

    def host_seconds(self, work: StepWork) -> float:
        return 1.0

    def card_seconds(self, work: StepWork) -> float:
        return 2.0 + work.context_tokens / 100 + work.copied_bytes / 1000

    def stated(self) -> Mapping[str, Any]:
        return {"kind": "seconds"}


def run(*requests: TraceRequest, blocks: int = 100, **knobs: Any) -> SimulationResult:
    config = BudgetConfig(**{"max_seq_len": 1000, "tokens_per_block": 10, "overlap": False, **knobs})
    return simulate(Trace("few", requests), kv_blocks=blocks, clock=Seconds(), config=config)


def durations(result: SimulationResult) -> tuple[float, float, float]:
    spreads = result.time_to_first_token, result.time_per_token, result.time_to_last_token
    assert all(spreads)
    return spreads[0].mean, spreads[1].mean, spreads[2].mean  # type: ignore[union-attr]


def test_one_request_takes_a_prompt_step_and_one_step_per_further_token() -> None:
    result = run(TraceRequest(5.0, 100, 4))
    assert durations(result) == (4.0, 3.0, 13.0)
    assert result.virtual_s == 18.0
    assert (result.steps.total, result.steps.decode, result.steps.context_tokens) == (4, 3, 100)
    assert result.batch_size_histogram == {1: 3}
    assert result.steps.generation_tokens == 4


def test_overlap_hides_the_host_behind_the_card() -> None:
    assert durations(run(TraceRequest(0.0, 100, 4), overlap=True)) == (4.0, 2.0, 10.0)


def test_arrivals_during_a_step_wait_for_its_end() -> None:
    result = run(TraceRequest(0.0, 100, 2), TraceRequest(1.0, 100, 2))
    assert result.time_to_first_token is not None
    # The second one's prompt is computed from 4 s to 8 s, together with the first one's second token.
    assert result.time_to_first_token.largest == 7.0
    assert result.virtual_s == 11.0
    assert result.batch_size_histogram == {1: 1}


def test_blocks_are_counted_over_time() -> None:
    result = run(TraceRequest(0.0, 100, 3))
    assert result.kv.peak_used_blocks == 11
    # 10 blocks in the prompt's step of 4 s, 11 in two steps of 3 s.
    assert result.kv.mean_used_blocks == pytest.approx((10 * 4 + 11 * 6) / 10)
    assert [(point.until_s, point.used_blocks) for point in result.timeline] == [(4.0, 10.0), (7.0, 11.0), (10.0, 11.0)]


def test_what_never_fits_is_refused_and_the_rest_is_served() -> None:
    result = run(TraceRequest(0.0, 100, 101), TraceRequest(0.0, 1001, 1), TraceRequest(0.0, 100, 100), blocks=20)
    assert (result.requests.refused, result.requests.finished, result.requests.failed) == (2, 1, 0)
    assert result.kv.prompt_tokens == 100


def test_a_prompt_without_chunking_has_to_fit_in_a_step() -> None:
    requests = TraceRequest(0.0, 300, 1), TraceRequest(0.0, 200, 1)
    assert run(*requests, enable_chunked_prefill=False, max_num_tokens=200).requests.refused == 1
    assert run(*requests, max_num_tokens=200).requests.refused == 0


def test_answers_end_at_max_seq_len() -> None:
    result = run(TraceRequest(0.0, 990, 500), blocks=101)
    assert result.requests.finished == 1
    assert result.steps.generation_tokens == 11


def test_a_cap_on_attended_tokens_defers() -> None:
    config = BudgetConfig(max_seq_len=1000, tokens_per_block=10, enable_block_reuse=False)
    trace = Trace("two", (TraceRequest(0.0, 100, 1), TraceRequest(0.0, 100, 1)))
    result = simulate(trace, kv_blocks=100, clock=Seconds(), config=config, attended_tokens_cap=150)
    assert (result.steps.deferred, result.requests.finished) == (1, 2)


def test_copies_between_tiers_take_their_time() -> None:
    """The second prompt pushes 4 blocks of 100 bytes of the first one out; the third one brings them back, and pushes
    those of the second out."""
    requests = [TraceRequest(at, 49, 1, (number,)) for at, number in ((0.0, 0), (10.0, 1), (20.0, 0))]
    config = BudgetConfig(max_seq_len=100, tokens_per_block=10, overlap=False, host_cache_bytes=1000)
    trace = Trace("three", tuple(requests))
    result = simulate(trace, kv_blocks=[CountedPool(5, None, 10)], clock=Seconds(), config=config)
    assert (result.kv.counters["offloaded"], result.kv.counters["onboarded"]) == (4 + 4, 4)
    assert result.virtual_s == pytest.approx(20.0 + 3.0 + 0.09 + (4 + 4) * 0.1)


LOAD = SyntheticLoad(requests=150, requests_per_s=50.0, turn_tokens=600, output_tokens=120, longest_tokens=4000)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("host_cache_bytes", [0, 200_000_000])
def test_every_manager_and_policy_serves_all(
    clock: RooflineClock, manager: str, policy: str, host_cache_bytes: int
) -> None:
    trace = synthetic_trace(5, LOAD)
    config = BudgetConfig(
        max_seq_len=trace.longest_tokens,
        max_batch_size=16,
        kv_cache_manager=manager,
        scheduler_policy=policy,
        host_cache_bytes=host_cache_bytes,
    )
    result = simulate(trace, kv_blocks=[CountedPool(300, None, 131_072)], clock=clock, config=config)
    assert result.requests.finished == 150
    assert (result.kv.counters["onboarded"] > 0) == (host_cache_bytes > 0)
    assert sum(result.batch_size_histogram.values()) == result.steps.decode
    assert result.steps.context_tokens >= result.kv.prompt_tokens - result.kv.reused_tokens


def test_windows_have_pools_of_their_own(clock: RooflineClock) -> None:
    trace = synthetic_trace(5, LOAD)
    config = BudgetConfig(max_seq_len=trace.longest_tokens, max_batch_size=16)
    result = simulate(trace, kv_blocks=[CountedPool(600), CountedPool(200, 512)], clock=clock, config=config)
    assert result.requests.finished == 150
    assert result.kv.reused_tokens == 0


def test_the_same_trace_gives_the_same_result(clock: RooflineClock) -> None:
    once, again = (simulate(synthetic_trace(5, LOAD), kv_blocks=600, clock=clock).to_dict() for _ in range(2))
    assert once == again


def test_unusable_questions_are_refused(clock: RooflineClock) -> None:
    trace = Trace("one", (TraceRequest(0.0, 10, 1),))
    with pytest.raises(ConfigError, match="kv_blocks"):
        simulate(trace, kv_blocks=0, clock=clock)
    with pytest.raises(ConfigError, match="at least one request"):
        simulate(Trace("none", ()), kv_blocks=1, clock=clock)
    config = BudgetConfig(max_seq_len=32, host_cache_bytes=10**9)
    with pytest.raises(ConfigError, match="--kv-bytes-per-token"):
        simulate(trace, kv_blocks=1, clock=clock, config=config)
