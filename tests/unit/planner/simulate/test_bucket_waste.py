"""Planned graph batch sizes against the engines' default lists, on traces served by one card with at most 256 requests
in a step: Llama-3.1-8B on an H100-SXM-80GB."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onebudget.config import BudgetConfig
from onebudget.planner.bucket_advice import MODELLED, BucketAdvice, advise_buckets, equal_cost
from onebudget.planner.simulate import (
    RooflineClock,
    SyntheticLoad,
    Trace,
    simulate,
    synthetic_trace,
)
from onebudget.units import GIB, MIB

CAP = 256
ALL = 10**6
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
H100 = RooflineClock(
    gpu="H100-SXM-80GB",
    weight_bytes=16_060_522_496,
    flops_per_token=2 * 7_504_924_672,
    kv_bytes_per_token=KV_BYTES_PER_TOKEN,
    flops_per_attended_pair=4 * 32 * 32 * 128,
    bandwidth_bytes_per_s=3_352_000_000_000,
    peak_flops=989.4e12,
)
COSTS = (MODELLED, equal_cost(8 * MIB, "equal"))


def decode_batches(trace: Trace, rate: float) -> dict[int, float]:
    trace = trace.at_rate(rate)
    config = BudgetConfig(max_seq_len=trace.longest_tokens, max_batch_size=CAP, max_num_tokens=8192)
    blocks = 55 * GIB // KV_BYTES_PER_TOKEN // config.tokens_per_block
    return dict(simulate(trace, kv_blocks=blocks, clock=H100, config=config).batch_size_histogram)


def assert_wastes_less(advice: BucketAdvice) -> int:
    """How many default lists were judged."""
    assert len(advice.comparisons) == 4
    for row in advice.comparisons:
        assert row.planned.hit_rate >= row.default.hit_rate, row.default.name
        assert row.planned.graph_bytes <= row.default.graph_bytes, row.default.name
        assert row.planned.padded_tokens <= row.default.padded_tokens, row.default.name
        if row.judged:
            assert row.fewer_share >= 0.3, (advice.load, row.default.name, row.fewer_share)
    return sum(row.judged for row in advice.comparisons)


def check(trace: Trace, rate: float) -> None:
    histogram = decode_batches(trace, rate)
    assert max(histogram) <= CAP
    for cost in COSTS:
        advice = advise_buckets(histogram, load=f"{trace.name} x{rate}", max_batch_size=CAP, cost=cost)
        assert assert_wastes_less(advice) >= 1


@pytest.mark.parametrize("rate", [1, 4])
def test_a_synthetic_trace(rate: float) -> None:
    check(synthetic_trace(0, SyntheticLoad(requests=1500, requests_per_s=4.0)), rate)


@pytest.mark.parametrize("rate", [1, 4])
def test_coding_requests(first_of: Callable[[str, int], Trace], rate: float) -> None:
    check(first_of("azure_code_2023.csv", ALL), rate)


@pytest.mark.long
@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("name", ["azure_conv_2023.csv", "mooncake_conversation.jsonl"])
def test_chat_requests(first_of: Callable[[str, int], Trace], name: str, rate: float) -> None:
    check(first_of(name, ALL), rate)
