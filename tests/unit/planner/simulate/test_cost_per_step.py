"""What a step costs does not depend on how many requests are over: counted calls and lines, and counted objects."""

from __future__ import annotations

import gc
import sys
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from onebudget.config import BudgetConfig
from onebudget.planner.simulate import CountedPool, RooflineClock, Simulation, Trace, TraceRequest

PROMPT, OUTPUT, BLOCKS = 96, 12, 60


def steady(requests: int) -> Trace:
    """Equal requests at equal distances, each with a prompt of its own."""
    traced = (TraceRequest(number * 0.02, PROMPT, OUTPUT, (number,)) for number in range(requests))
    return Trace("steady", tuple(traced))


def started(clock: RooflineClock, requests: int) -> Simulation:
    """Of a pool that a few requests fill, so that every one evicts what earlier ones left."""
    config = BudgetConfig(max_seq_len=128, tokens_per_block=16, max_batch_size=4)
    return Simulation(steady(requests), [CountedPool(BLOCKS)], config, clock)


class Counted:
    """Lines of Python that run inside the block."""

    def __init__(self) -> None:
        self.lines = 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines += 1
        return self._trace

    def __enter__(self) -> Counted:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


def lines_of(simulation: Simulation, requests: int) -> tuple[int, int]:
    """Lines and steps until that many more requests ended."""
    ended, steps = 0, simulation.card.steps
    with Counted() as counted:
        while ended < requests:
            ended += simulation.advance()
    return counted.lines, simulation.card.steps - steps


def test_lines_per_step_stay_the_same(clock: RooflineClock) -> None:
    simulation = started(clock, 2000)
    ended = 0
    while ended < 100:
        ended += simulation.advance()
    early = lines_of(simulation, 100)
    while ended < 1700:
        ended += simulation.advance()
    late = lines_of(simulation, 100)
    assert simulation.kv.counters.evicted > 1000
    assert late[1] == early[1]
    assert late[0] == pytest.approx(early[0], rel=0.02)


def reachable(root: object) -> int:
    """Objects that hang on ``root``, classes and code left out."""
    seen, below = {id(root)}, [root]
    while below:
        for one in gc.get_referents(below.pop()):
            if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType, MethodType)):
                seen.add(id(one))
                below.append(one)
    return len(seen)


def test_nothing_is_kept_of_requests_that_are_over(clock: RooflineClock) -> None:
    left = []
    for requests in (50, 500):
        simulation = started(clock, requests)
        while not simulation.done:
            simulation.advance()
        simulation.kv.reset_reuse()
        left.append(reachable(simulation.kv) + reachable(simulation.scheduler))
    assert left[1] <= left[0] + 10
