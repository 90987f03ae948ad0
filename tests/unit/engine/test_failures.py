"""Classes of errors, the error budget, and what happens when memory runs out inside a step."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams
from onebudget.device.sample import MemorySample
from onebudget.devtools.scripted import ScriptedRunner, scripted_executor
from onebudget.engine.executor import Executor
from onebudget.engine.failures import ContextLimit, ErrorBudget, Relief, classify, may_retry
from onebudget.errors import AllocationError, CapacityError, DeviceError, StateError


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "severity"),
    [
        (RuntimeError("cudaErrorIllegalAddress at 0x0"), "fatal"),
        (RuntimeError("CUDA error: cudaErrorLaunchFailure"), "fatal"),
        (RuntimeError("a device-side assert triggered"), "fatal"),
        (ValueError("Unrecoverable state"), "fatal"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "severe"),
        (RuntimeError("CUDA error: invalid argument"), "severe"),
        (RuntimeError("NCCL error in: comm.cpp"), "severe"),
        (DeviceError("cudaErrorLaunchFailure", 719, "launch"), "fatal"),
        (AllocationError(10, 5), "severe"),
        (OutOfMemoryError("no room"), "severe"),
        (RuntimeError("anything else"), "transient"),
        (KeyError("x"), "transient"),
    ],
)
def test_classes(error: Exception, severity: str) -> None:
    assert classify(error) == severity


def test_ten_transient_or_two_severe_errors_in_a_row_are_too_many() -> None:
    for severity, times in (("transient", 10), ("severe", 2), ("fatal", 1)):
        budget = ErrorBudget()
        for _ in range(times - 1):
            budget.charge(severity)  # type: ignore[arg-type]
            assert not budget.exhausted
        budget.charge(severity)  # type: ignore[arg-type]
        assert budget.exhausted


def test_good_steps_give_back_what_they_took_and_no_more() -> None:
    budget = ErrorBudget()
    budget.regain()
    assert budget.left == 1.0
    budget.charge("severe")
    for _ in range(9):
        budget.regain()
    assert budget.left == 0.95
    budget.regain()
    budget.regain()
    assert budget.left == 1.0


@given(st.lists(st.sampled_from(["transient", "severe", "good"]), max_size=60))
def test_the_budget_is_what_was_charged_and_given_back(events: list[str]) -> None:
    budget, percent = ErrorBudget(), 100
    for event in events:
        if event == "good":
            budget.regain()
            percent = min(100, percent + 5)
        else:
            budget.charge(event)  # type: ignore[arg-type]
            percent -= 10 if event == "transient" else 50
        assert budget.left == percent / 100
        assert budget.exhausted == (percent <= 0)


# -- in the loop --------------------------------------------------------------------------------------------------


def engine_of(overlap: bool = True, **knobs: Any) -> Executor:
    config = BudgetConfig(**{"max_seq_len": 256, "max_num_tokens": 64, "tokens_per_block": 4, **knobs})
    return scripted_executor(config.replace(overlap=overlap), 64)


def runner(engine: Executor) -> ScriptedRunner:
    return cast("ScriptedRunner", engine.runner)


def request(number: int, prompt: int = 5, new: int = 3) -> Request:
    return Request(number, [10 + number] * prompt, SamplingParams(), max_new_tokens=new)


def drain(engine: Executor) -> list[Request]:
    ended = []
    for _ in range(2000):
        if not engine.has_work:
            return ended
        ended += engine.step()
    raise AssertionError("the loop does not end")


def assert_empty(engine: Executor) -> None:
    engine.kv.reset_reuse()
    assert not engine.has_work
    assert engine.kv.free_blocks == engine.kv.max_resource_count()
    assert engine.slots.free_slots == engine.slots.max_resource_count()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_fatal_error_ends_everybody_and_nothing_is_computed_any_more(overlap: bool) -> None:
    engine = engine_of(overlap, max_batch_size=2)
    members = [request(number) for number in range(4)]
    for one in members:
        engine.submit(one)
    engine.step()
    runner(engine).faults.append(RuntimeError("cudaErrorIllegalAddress"))
    steps = len(runner(engine).steps)
    ended = engine.step()
    assert sorted(one.id for one in ended) == [0, 1, 2, 3]
    assert all(one.finish_reason == "error" and "cudaErrorIllegalAddress" in (one.error or "") for one in members)
    assert_empty(engine)
    with pytest.raises(StateError, match="the engine stopped after 1 failed step"):
        engine.submit(request(9))
    assert engine.step() == []
    assert len(runner(engine).steps) == steps
    engine.shutdown()


@pytest.mark.parametrize("overlap", [True, False])
def test_transient_errors_stop_the_engine_only_when_they_keep_coming(overlap: bool) -> None:
    engine = engine_of(overlap)
    for number in range(9):
        runner(engine).faults.append(RuntimeError("injected"))
        engine.submit(request(number))
        assert [one.finish_reason for one in drain(engine)] == ["error"]
        assert engine.stopped is None
    for number in range(20, 30):
        engine.submit(request(number))
        assert [one.finish_reason for one in drain(engine)] == ["length"]
    assert engine.error_budget.left == 1.0
    for number in range(40, 50):
        runner(engine).faults.append(RuntimeError("injected"))
        engine.submit(request(number))
        drain(engine)
    assert engine.stopped is not None and "injected" in engine.stopped


def test_a_request_that_finds_no_blocks_charges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    for number in range(20):
        engine.submit(request(number))
        full = CapacityError("no room", request_id=number)

        def no_room(batch: object, full: CapacityError = full) -> None:
            raise full

        monkeypatch.setattr(engine.kv, "prepare", no_room)
        assert [one.id for one in drain(engine)] == [number]
    assert (engine.error_budget.left, engine.stopped) == (1.0, None)
    assert_empty(engine)


# -- memory -------------------------------------------------------------------------------------------------------


SAMPLE = MemorySample(100, 3, 90, 97)


def relief(freed_bytes: int) -> Relief:
    return Relief(SAMPLE, {"weights": 60, "kv_cache": 30, "context_workspace": 0}, freed_bytes)


@pytest.mark.parametrize(
    ("freed", "written", "retry"), [(10, False, True), (9, False, False), (10, True, False), (0, False, False)]
)
def test_a_batch_runs_again_where_nothing_was_written_and_enough_came_free(
    freed: int, written: bool, retry: bool
) -> None:
    assert may_retry(AllocationError(10, 3), relief(freed), kv_written=written) == retry


def test_torchs_own_error_needs_something_to_have_come_free() -> None:
    assert may_retry(OutOfMemoryError(), relief(1), kv_written=False)
    assert not may_retry(OutOfMemoryError(), relief(0), kv_written=False)


def test_what_was_held_is_told_by_owner() -> None:
    assert str(relief(7)) == "3 B of 100 B were free; held by: kv_cache 30 B, weights 60 B. Emptying caches freed 7 B."


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("written", "freed", "reasons"), [(False, 50, "length"), (True, 50, "error"), (False, 5, "error")]
)
def test_out_of_memory_in_a_forward(overlap: bool, written: bool, freed: int, reasons: str) -> None:
    engine = engine_of(overlap, max_batch_size=2)
    members = [request(number) for number in range(2)]
    for one in members:
        engine.submit(one)
    engine.step()
    scripted = runner(engine)
    scripted.kv_written, scripted.relief = written, relief(freed)
    scripted.faults.append(AllocationError(40, 3, owner="activations"))
    engine.submit(other := request(5))
    drain(engine)
    assert {one.finish_reason for one in members} == {reasons}
    assert other.finish_reason == "length"
    assert engine.counters.retried_steps == (reasons == "length")
    assert engine.error_budget.left == 1.0 or reasons == "error"
    assert_empty(engine)


def test_a_retry_that_fails_too_fails_the_batch() -> None:
    engine = engine_of()
    scripted = runner(engine)
    scripted.kv_written, scripted.relief = False, relief(50)
    scripted.faults += [AllocationError(40, 3), AllocationError(40, 3)]
    engine.submit(request(0))
    assert [one.finish_reason for one in drain(engine)] == ["error"]
    assert_empty(engine)


def test_again_within_a_hundred_steps_halves_the_context_tokens() -> None:
    limit = ContextLimit(max_tokens=100, tokens_per_block=32)
    assert not limit.failed(step=5)
    assert not limit.failed(step=106)
    assert limit.failed(step=206) and limit.tokens == 50
    assert limit.failed(step=207) and limit.tokens == 32
    assert not limit.failed(step=208) and limit.tokens == 32
    for _ in range(99):
        limit.passed()
    assert limit.tokens == 32
    limit.passed()
    assert limit.tokens == 64
    for _ in range(100):
        limit.passed()
    assert limit.tokens == 100 and not limit.lowered


def test_lowered_steps_are_a_delay_and_end() -> None:
    engine = engine_of(overlap=False, max_num_tokens=64)
    for number in range(2):
        runner(engine).faults.append(AllocationError(40, 3))
        engine.submit(request(number, prompt=60))
        drain(engine)
        for other in range(12):  # good steps pay for the error
            engine.submit(request(100 * (number + 1) + other, prompt=1, new=1))
            drain(engine)
    assert engine.scheduler.max_context_tokens == 32
    engine.submit(long := request(50, prompt=120, new=1))
    before = len(runner(engine).steps)
    drain(engine)
    assert runner(engine).steps[before:] == [{50: 32}, {50: 32}, {50: 32}, {50: 24}]
    assert long.finish_reason == "length"


# -- any place, any time ------------------------------------------------------------------------------------------


SITES = ("slots.prepare", "kv.prepare", "kv.begin_all", "kv.update", "runner.forward", "runner.sample")


@given(
    st.sampled_from(SITES), st.integers(0, 12), st.booleans(),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=8),
)  # fmt: skip
def test_memory_that_runs_out_anywhere_leaks_nothing(
    site: str, at_call: int, overlap: bool, load: list[tuple[int, int]]
) -> None:
    """Requests of other steps complete, and afterwards the engine serves as before."""
    engine = engine_of(overlap, max_batch_size=3, max_num_tokens=16)
    holder, name = site.split(".")
    target = getattr(engine, holder)
    original, calls = getattr(type(target), name), iter(range(10_000))

    def short(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at_call:
            raise AllocationError(1 << 20, 0, owner="test")
        return original(target, *args, **kwargs)

    members = [request(number, prompt, new) for number, (prompt, new) in enumerate(load)]
    for one in members:
        engine.submit(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), name, lambda self, *args, **kwargs: short(*args, **kwargs))
        drain(engine)
    assert all(one.finished for one in members)
    assert_empty(engine)
    failed = [one for one in members if one.finish_reason == "error"]
    assert len(failed) <= 3  # one batch
    assert all(len(one.output_token_ids) == one.max_new_tokens for one in members if one.finish_reason == "length")
    engine.submit(after := request(99))
    drain(engine)
    assert after.finish_reason == "length"
    assert_empty(engine)
