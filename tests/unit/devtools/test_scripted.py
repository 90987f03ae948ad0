from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams
from onebudget.devtools.scripted import ScriptedRunner, scripted_executor
from onebudget.resources.kv.store import CountedStore


def test_tokens_come_from_the_script_and_steps_are_kept() -> None:
    config = BudgetConfig(max_seq_len=64, max_num_tokens=4, tokens_per_block=4)
    engine = scripted_executor(config, 8, lambda request: 10 + len(request.output_token_ids))
    request = Request(5, [1] * 6, SamplingParams(), max_new_tokens=3)
    engine.submit(request)
    while engine.has_work:
        engine.step()
    runner = cast("ScriptedRunner", engine.runner)
    assert request.output_token_ids == [10, 11, 12]
    assert runner.steps == [{5: 4}, {5: 2}, {5: 1}, {5: 1}]
    engine.shutdown()
    assert runner.released
    assert cast("CountedStore", engine.kv.pool).released


def test_a_fault_is_raised_once_in_the_next_step() -> None:
    engine = scripted_executor(BudgetConfig(max_seq_len=64), 8)
    cast("ScriptedRunner", engine.runner).faults.append(RuntimeError("planned"))
    requests = [Request(number, [1], SamplingParams(), max_new_tokens=1) for number in range(2)]
    for request in requests:
        engine.submit(request)
        engine.step()
    assert [request.error for request in requests] == ["RuntimeError: planned", None]
