"""Nothing runs, nothing is in flight, nobody was put off: the loop raises instead of spinning."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams
from onebudget.devtools.scripted import scripted_executor
from onebudget.errors import StateError
from onebudget.scheduling.deadlock import PATIENCE_STEPS


def request(number: int, prompt: int, new: int) -> Request:
    return Request(number, [number + 2] * prompt, SamplingParams(), max_new_tokens=new)


@pytest.mark.parametrize("overlap", [True, False])
def test_blocks_that_never_come_back(overlap: bool) -> None:
    """Somebody else holds most of the pool: what waits needs more than is left."""
    config = BudgetConfig(
        max_seq_len=64, max_num_tokens=32, tokens_per_block=4, overlap=overlap, scheduler_policy="max_utilization"
    )
    engine = scripted_executor(config, 8)
    engine.kv.groups[0].blocks.take(6)
    engine.submit(request(1, 20, 2))
    for _ in range(PATIENCE_STEPS - 1):
        assert engine.step() == []
    with pytest.raises(StateError) as stuck:
        engine.step()
    message = str(stuck.value)
    for part in ("1 wait", "0 hold seats", "8 blocks of 4 tokens", "6 held and 2 free", "request 1 (20 prompt"):
        assert part in message


def test_waiting_for_a_step_in_flight_is_no_deadlock() -> None:
    config = BudgetConfig(max_seq_len=64, max_num_tokens=32, tokens_per_block=4, max_batch_size=1)
    engine = scripted_executor(config, 8)
    for number in range(40):
        engine.submit(request(number, 4, 1))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps >= 80
