"""How fast a trace is simulated: ``python bench/simulate.py [TRACE] [--requests N] [--batch N]``.

Llama-3.1-8B on one H100-SXM-80GB under a virtual clock: 10,000 requests of the Mooncake conversation trace, or of a
synthetic one where that is not at hand. Prints seconds of wall clock, steps per second, and what came of the trace.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from onebudget.config import BudgetConfig
from onebudget.planner.simulate import (
    RooflineClock,
    SyntheticLoad,
    Trace,
    read_trace,
    simulate,
    synthetic_trace,
)

KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
KV_POOL_BYTES = 55 * 2**30
CLOCK = RooflineClock(
    gpu="H100-SXM-80GB",
    weight_bytes=16_060_522_496,
    flops_per_token=2 * 7_504_924_672,
    kv_bytes_per_token=KV_BYTES_PER_TOKEN,
    flops_per_attended_pair=4 * 32 * 32 * 128,
    bandwidth_bytes_per_s=3_352_000_000_000,
    peak_flops=989.4e12,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="left out: a synthetic trace")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=256, help="max_batch_size")
    parser.add_argument("--tokens-per-block", type=int, default=32)
    given = parser.parse_args()
    started = time.perf_counter()
    trace = _trace(given.trace, given.requests)
    read = time.perf_counter()
    config = BudgetConfig(
        max_seq_len=trace.longest_tokens,
        max_batch_size=given.batch,
        max_num_tokens=8192,
        tokens_per_block=given.tokens_per_block,
    )
    blocks = KV_POOL_BYTES // KV_BYTES_PER_TOKEN // given.tokens_per_block
    result = simulate(trace, kv_blocks=blocks, clock=CLOCK, config=config)
    seconds = time.perf_counter() - read
    steps, tokens = result.steps.total, result.steps.generation_tokens
    print(f"{trace.name}: {len(trace.requests):,} requests, read in {read - started:.2f} s")
    rates = f"{steps / seconds:,.0f} steps/s, {tokens / seconds:,.0f} generated tokens/s"
    print(f"simulated in {seconds:.1f} s: {steps:,} steps, {rates}")
    print(f"{result.virtual_s:,.0f} s of virtual time, {result.kv.hit_rate:.2%} of prompt tokens reused")


def _trace(path: Path | None, requests: int) -> Trace:
    if path is not None:
        return read_trace(path, limit=requests)
    return synthetic_trace(0, SyntheticLoad(requests=requests, requests_per_s=4.0))


if __name__ == "__main__":
    main()
