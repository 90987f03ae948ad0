"""The admission cap: prompts of one step attend to no more than the context workspace covers; the others wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget import LLM
from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams
from onebudget.devtools.scripted import ScriptedRunner, scripted_executor
from onebudget.engine import assembly
from onebudget.engine.executor import Executor
from onebudget.errors import CapacityError, ConfigError

BLOCK = 16
GREEDY = SamplingParams(temperature=0)


def engine(cap: int | None, blocks: int = 1000, **knobs: Any) -> Executor:
    settings = {"max_seq_len": 512, "max_num_tokens": 4096, "tokens_per_block": BLOCK, "overlap": False, **knobs}
    executor = scripted_executor(BudgetConfig(**settings), blocks)
    executor.kv.attended_tokens_cap = cap
    return executor


def request(number: int, prompt: int, new: int = 1, *, first: int | None = None, dummy: bool = False) -> Request:
    """A prompt nobody shares, unless ``first`` says which token it starts with."""
    tokens = [1000 + number if first is None else first] * prompt
    return Request(number, tokens, GREEDY, max_new_tokens=new, is_dummy=dummy)


def submit(executor: Executor, prompts: list[int], new: int = 1) -> list[Request]:
    requests = [request(number, prompt, new) for number, prompt in enumerate(prompts)]
    for one in requests:
        executor.submit(one)
    return requests


def runner(executor: Executor) -> ScriptedRunner:
    assert isinstance(executor.runner, ScriptedRunner)
    return executor.runner


def drain(executor: Executor) -> list[list[int]]:
    """Serve everything; returns who computed in each step."""
    while executor.has_work:
        executor.step()
    return [list(step) for step in runner(executor).steps]


@pytest.mark.parametrize(
    ("cap", "prompts", "steps"),
    [
        (120, [50, 50, 50], [[0, 1], [2]]),
        (120, [200, 50], [[0], [1]]),
        (1, [30], [[0]]),
        (0, [30, 30, 30], [[0], [1], [2]]),
        (150, [50, 50, 50], [[0, 1, 2]]),
        (149, [50, 50, 50], [[0, 1], [2]]),
        (120, [50, 100, 20], [[0], [1, 2]]),  # the small one behind it does not overtake
        (None, [200, 200, 200], [[0, 1, 2]]),
    ],
)
def test_who_runs_in_which_step(cap: int | None, prompts: list[int], steps: list[list[int]]) -> None:
    executor = engine(cap)
    requests = submit(executor, prompts)
    assert drain(executor) == steps
    assert all(one.finish_reason == "length" for one in requests)
    # A request is counted once for every step it was held back in.
    waits = sum(at for at, step in enumerate(steps) for _ in step)
    assert executor.counters.deferred == waits


def test_a_chunk_attends_to_what_was_computed_before() -> None:
    """The first in the list runs although its later chunks alone are beyond the cap; nobody runs beside it then."""
    executor = engine(300, max_num_tokens=200)
    executor.submit(request(0, 500))
    executor.submit(request(1, 20))
    for _ in range(3):
        executor.step()
    assert runner(executor).steps == [{0: 192}, {0: 192}, {0: 116}]  # chunks end on whole blocks
    assert executor.counters.deferred == 1  # in the third step alone there were tokens left for another
    executor.step()
    assert runner(executor).steps[-1] == {1: 20}


def test_generation_runs_beside_the_one_prompt_that_a_cap_of_0_lets_in() -> None:
    executor = engine(0, max_num_tokens=60)
    submit(executor, [50, 200, 30], new=3)
    executor.step()
    executor.step()
    assert runner(executor).steps == [{0: 50}, {1: 48, 0: 1}]


def test_prompts_on_their_way_can_be_held_back() -> None:
    """A step that failed for one request leaves the others started but not computed."""
    executor = engine(None)
    first, second, third = submit(executor, [50, 50, 50])
    runner(executor).faults.append(CapacityError("no block", request_id=first.id))
    executor.step()
    assert first.finish_reason == "error"
    executor.kv.attended_tokens_cap = 60
    held = list(executor.kv.block_table(third))
    executor.step()
    assert runner(executor).steps == [{1: 50}]
    assert (third.state, third.computed_tokens) == (RequestState.CONTEXT, 0)
    assert executor.scheduler.running == [third]
    assert executor.kv.block_table(third) == held
    assert executor.counters.deferred == 1
    executor.step()
    assert runner(executor).steps == [{1: 50}, {2: 50}]
    assert second.finish_reason == third.finish_reason == "length"


def test_a_waiting_request_is_left_as_it_was() -> None:
    executor = engine(100)
    first, second, third = submit(executor, [90, 60, 30])
    executor.step()
    for one in (second, third):
        assert (one.state, one.computed_tokens, one.chunk_tokens) == (RequestState.WAITING, 0, 0)
        assert not one.output_token_ids
    assert list(executor.scheduler.waiting) == [second, third]
    assert executor.scheduler.running == [] and first.finished
    assert executor.kv.used_blocks == 0
    assert executor.slots.free_slots == executor.config.max_batch_size
    executor.cancel(second)
    assert list(executor.scheduler.waiting) == [third]
    assert drain(executor)[-1] == [2]


def test_a_reused_prefix_counts_before_its_request_starts() -> None:
    """100 tokens of a 150-token prompt are kept (96, whole blocks): computing the rest attends to all 150.

    The second starts differently behind the kept part, so that it gains nothing from waiting for the first.
    """
    executor = engine(200)
    executor.submit(request(0, 100, first=7))
    drain(executor)
    twins = [request(number, 150, first=7) for number in (1, 2)]
    twins[1].prompt_token_ids[96:] = [8] * 54
    for one in twins:
        executor.submit(one)
    held = executor.kv.used_blocks
    executor.step()
    assert runner(executor).steps[-1] == {1: 54}
    assert twins[1].state is RequestState.WAITING
    assert executor.counters.reused_tokens == 96  # what the second would reuse is neither held nor counted yet
    assert executor.kv.used_blocks == held == 0
    assert executor.counters.deferred == 1
    executor.step()
    assert runner(executor).steps[-1] == {2: 54}
    assert executor.counters.reused_tokens == 96 + 96


def test_a_request_waits_for_the_step_that_computes_its_next_block() -> None:
    """Of two prompts that go on alike behind what is kept, the second starts a step later and reuses the first's."""
    executor = engine(None)
    executor.submit(request(0, 100, first=7))
    drain(executor)
    for number in (1, 2):
        executor.submit(request(number, 150, first=7))
    executor.submit(request(3, 40))
    executor.step()
    executor.step()
    assert runner(executor).steps[1:] == [{1: 54, 3: 40}, {2: 6}]
    assert (executor.counters.skipped, executor.counters.deferred) == (1, 0)
    assert executor.counters.reused_tokens == 96 + 144


def test_without_reuse_and_chunks_the_cap_holds_too() -> None:
    executor = engine(120, enable_block_reuse=False, enable_chunked_prefill=False)
    submit(executor, [50, 50, 50])
    assert drain(executor) == [[0, 1], [2]]


def test_dummies_know_no_cap() -> None:
    """Warm-up repeats the profile's steps, which had none."""
    executor = engine(0)
    for number in range(3):
        executor.submit(request(-1 - number, 50, dummy=True))
    assert drain(executor) == [[-1, -2, -3]]
    assert executor.counters.deferred == 0


@given(
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    cap=st.integers(0, 400),
    tokens=st.sampled_from([16, 60, 300]),
    seats=st.integers(1, 4),
    shared=st.booleans(),
)
def test_everybody_is_served_and_no_step_attends_to_more(
    prompts: list[int], cap: int, tokens: int, seats: int, shared: bool
) -> None:
    executor = engine(cap, blocks=60, max_num_tokens=tokens, max_batch_size=seats)
    requests = [request(number, prompt, 2, first=7 if shared else None) for number, prompt in enumerate(prompts)]
    for one in requests:
        executor.submit(one)
    while executor.has_work:
        before = {one.id: one.computed_tokens for one in requests if one.state is not RequestState.GENERATION}
        reused = executor.scheduler.reused_tokens
        executor.step()
        step = runner(executor).steps[-1]
        assert step
        contexts = [number for number in step if number in before]
        reused = executor.scheduler.reused_tokens - reused
        attended = sum(before[number] + step[number] for number in contexts) + reused
        assert len(contexts) <= 1 or attended <= cap
    assert [one.finish_reason for one in requests] == ["length"] * len(requests)
    assert executor.kv.used_blocks == 0


# -- in the whole engine ------------------------------------------------------------------------------------------


MLA = {"dtype": "fp32", "max_seq_len": 128, "max_batch_size": 4, "max_num_tokens": 32, "tokens_per_block": 8}


@pytest.fixture
def caps(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The caps that managers were made with, in order."""
    seen: list[int | None] = []

    original = assembly.build_kv_cache

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("attended_tokens_cap"))
        return original(*args, **kwargs)

    monkeypatch.setattr(assembly, "build_kv_cache", noted)
    return seen


@pytest.mark.parametrize(
    ("knobs", "cap"),
    [
        ({}, 4 * 128),
        ({"context_kv_len_cap": 1}, 128),
        ({"context_kv_len_cap": 200}, 200),
        ({"context_kv_len_cap": 10**9}, 4 * 128),
        ({"enable_chunked_prefill": False}, 4 * 128),
        ({"enable_block_reuse": False}, 4 * 128),
        ({"enable_block_reuse": False, "enable_chunked_prefill": False}, None),
    ],
)
def test_the_manager_that_serves_gets_the_ledgers_cap_and_the_probe_none(
    tiny: Any, caps: list[int | None], knobs: dict[str, Any], cap: int | None
) -> None:
    with LLM(tiny("mla"), device_memory="8MiB", **MLA, **knobs) as llm:
        assert llm.budget.admission.attended_tokens_cap == cap
        assert caps == [None, cap]
        rate = 4 * (16 + 8 + 16) * 4
        assert llm.budget.term("context_workspace").bytes == (cap or 0) * rate


def test_models_whose_backend_declares_nothing_have_no_cap(tiny: Any, caps: list[int | None]) -> None:
    with LLM(tiny("gqa"), device_memory="8MiB", **MLA, enable_chunked_prefill=False) as llm:
        assert caps == [None, None]
        assert llm.budget.term("context_workspace").bytes == 0


def test_the_cap_can_come_from_the_environment(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_CONTEXT_KV_LEN_CAP", "300")
    with LLM(tiny("mla"), device_memory="8MiB", **MLA) as llm:
        assert llm.budget.admission.attended_tokens_cap == 300
    with LLM(tiny("mla"), device_memory="8MiB", **MLA, context_kv_len_cap=150) as llm:
        assert llm.budget.admission.attended_tokens_cap == 150
    monkeypatch.setenv("ONEBUDGET_CONTEXT_KV_LEN_CAP", "many")
    with pytest.raises(ConfigError, match="ONEBUDGET_CONTEXT_KV_LEN_CAP"):
        LLM(tiny("mla"), device_memory="8MiB", **MLA)


def test_a_cap_below_one_request_is_said_once(tiny: Any) -> None:
    """2 layers of 40 cached elements against 160 expanded: a third of the budget is cache."""
    with LLM(tiny("mla"), device_memory="8MiB", max_gpu_total_bytes=80_000, **MLA) as llm:
        rate, cost = 640, 2 * 40 * 4
        assert llm.budget.admission.attended_tokens_cap == 80_000 // (rate + cost) == 83
        warnings = [line for line in llm.budget.warnings if "attended tokens" in line]
        assert len(warnings) == 1 and "context_kv_len_cap can't raise it" in warnings[0]
        assert [one.finish_reason for one in llm.generate([[5] * 40, [6] * 40, [7] * 40])] == ["length"] * 3
