"""A trace over two pools of one quota, of which one stays almost empty unless blocks move."""

from __future__ import annotations

from typing import Any

import pytest

from onebudget.config import BudgetConfig
from onebudget.errors import ConfigError
from onebudget.planner.simulate import CountedPool, RooflineClock, Simulation, Trace, TraceRequest

CLOCK = RooflineClock(
    gpu="custom", weight_bytes=10**11, flops_per_token=10**9, kv_bytes_per_token=1000, flops_per_attended_pair=1000,
    bandwidth_bytes_per_s=10**12, peak_flops=10**14,
)  # fmt: skip
"""A step takes at least a tenth of a second."""
POOLS = [CountedPool(100, None, 8), CountedPool(100, 8, 8)]
"""A request of 320 tokens takes 80 blocks of the first and three of the second."""


def served(pools: list[CountedPool] = POOLS, **knobs: Any) -> Simulation:
    trace = Trace("long answers", tuple(TraceRequest(0.0, 20, 300) for _ in range(24)))
    config = BudgetConfig(
        max_seq_len=320, max_batch_size=4, max_num_tokens=40, tokens_per_block=4, kv_cache_manager="v2", **knobs
    )
    simulation = Simulation(trace, pools, config, CLOCK)
    while not simulation.done:
        simulation.advance()
    return simulation


@pytest.mark.parametrize("overlap", [False, True])
def test_moved_blocks_serve_more_at_once(overlap: bool) -> None:
    fixed, moving = served(overlap=overlap), served(overlap=overlap, kv_pool_rebalance=True)
    assert (fixed.rebalancer, [group.num_blocks for group in fixed.kv.groups]) == (None, [100, 100])
    assert moving.rebalancer is not None
    assert (moving.rebalancer.moves, moving.rebalancer.failed) == (1, 0)
    (first, second), total = (group.num_blocks for group in moving.kv.groups), moving.kv.allocated_bytes
    assert first > 150 and first + second == 200
    assert total == fixed.kv.allocated_bytes
    before, after = fixed.result(), moving.result()
    assert before.requests.finished == after.requests.finished == 24
    assert before.steps.generation_tokens == after.steps.generation_tokens == 24 * 300
    assert after.steps.total < before.steps.total
    assert [group.free_blocks for group in moving.kv.groups] == [first, second]
    assert before.settings["kv_pool_rebalance"] is False and after.settings["kv_pool_rebalance"] is True


def test_bytes_have_to_be_known() -> None:
    with pytest.raises(ConfigError, match="kv_pool_rebalance = True can't be counted"):
        served([CountedPool(100), CountedPool(100, 8)], kv_pool_rebalance=True)
    with pytest.raises(ConfigError, match="v1, which sizes every pool once"):
        BudgetConfig(kv_pool_rebalance=True)
    assert "kv_pool_rebalance" in BudgetConfig(kv_pool_rebalance=False).given
