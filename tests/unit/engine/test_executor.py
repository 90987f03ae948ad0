from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.devtools.scripted import ScriptedRunner, scripted_executor
from onebudget.engine.executor import Executor
from onebudget.errors import AllocationError, CapacityError, NoFreeSlotsError
from onebudget.resources import BaseResourceManager

END = 2


def executor(blocks: int = 16, script: Callable[[Request], int] = lambda request: 7, **knobs: Any) -> Executor:
    config = BudgetConfig(
        **{"max_seq_len": 256, "max_num_tokens": 64, "tokens_per_block": 4, "overlap": False, **knobs}
    )
    return scripted_executor(config, blocks, script)


def runner(engine: Executor) -> ScriptedRunner:
    return cast("ScriptedRunner", engine.runner)


def request(number: int, prompt: int, new: int, **params: Any) -> Request:
    return Request(
        number, [10 + number] * prompt, SamplingParams(**params), max_new_tokens=new, end_token_ids=frozenset([END])
    )


def drain(engine: Executor, limit: int = 1000) -> list[Request]:
    ended = []
    while engine.has_work:
        ended += engine.step()
        limit -= 1
        assert limit, "the loop does not end"
    return ended


def assert_empty(engine: Executor) -> None:
    assert not engine.has_work
    assert engine.kv.free_blocks == engine.kv.max_resource_count()
    assert engine.slots.free_slots == engine.slots.max_resource_count()
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


# -- the order of the hooks ---------------------------------------------------------------------------------------


class Tracing:
    """Notes the hooks of real managers, the forward, and every token."""

    def __init__(self, engine: Executor) -> None:
        self.lines: list[str] = []
        for name, manager in (("slot", engine.slots), ("kv", engine.kv)):
            for hook in ("prepare", "update", "free"):
                self._watch(manager, hook, f"{hook} {name}")
        self._watch(runner(engine), "forward", "forward")
        engine.set_listener(lambda one: self.lines.append(f"token {one.id}"))

    def _watch(self, target: BaseResourceManager | ScriptedRunner, hook: str, label: str) -> None:
        original = getattr(type(target), hook)

        def noted(subject: ScheduledBatch | Request, *rest: object) -> object:
            which = [one.id for one in subject.requests] if isinstance(subject, ScheduledBatch) else subject.id
            self.lines.append(f"{label} {which}")
            return original(target, subject, *rest)

        object.__setattr__(target, hook, noted)


def test_golden_trace_of_two_requests() -> None:
    """R1 (prompt 8, two tokens) and R2 (prompt 4, one token) arrive before the first step."""
    engine = executor()

    class Traced(ScriptedRunner):
        pass

    engine.runner = cast("Any", Traced(lambda one: 7))
    trace = Tracing(engine)
    engine.submit(first := request(1, 8, 2))
    engine.submit(second := request(2, 4, 1))
    assert engine.step() == [second]
    assert engine.step() == [first]
    assert engine.step() == []
    assert trace.lines == [
        "prepare slot [1, 2]", "prepare kv [1, 2]", "forward [1, 2]", "token 1", "token 2",
        "free kv 2", "free slot 2", "update slot [1, 2]", "update kv [1, 2]",
        "prepare slot [1]", "prepare kv [1]", "forward [1]", "token 1",
        "free kv 1", "free slot 1", "update slot [1]", "update kv [1]",
    ]  # fmt: skip
    assert (first.output_token_ids, second.output_token_ids) == ([7, 7], [7])
    assert_empty(engine)


def test_counters_count_steps_and_tokens() -> None:
    engine = executor(max_num_tokens=6)
    engine.submit(request(0, 8, 3))
    drain(engine)
    counters = engine.counters
    assert (counters.steps, counters.prefill_tokens, counters.decode_tokens) == (4, 8, 2)
    assert (counters.failed_steps, counters.graph_eager) == (0, 4)
    assert runner(engine).steps == [{0: 4}, {0: 4}, {0: 1}, {0: 1}]


# -- how requests end ---------------------------------------------------------------------------------------------


def test_length_and_end_token() -> None:
    script = {0: [7, 7, 7], 1: [7, END, 7]}
    engine = executor(script=lambda one: script[one.id][len(one.output_token_ids)])
    engine.submit(short := request(0, 3, 2))
    engine.submit(stopped := request(1, 3, 3))
    drain(engine)
    assert (short.output_token_ids, short.finish_reason) == ([7, 7], "length")
    assert (stopped.output_token_ids, stopped.finish_reason) == ([7, END], "stop")


def test_an_end_token_as_the_last_token_allowed_is_a_stop() -> None:
    engine = executor(script=lambda one: END)
    engine.submit(one := request(0, 3, 1))
    drain(engine)
    assert one.finish_reason == "stop"


def test_any_of_several_end_tokens_ends() -> None:
    script = {0: 3, 1: 5}
    engine = executor(script=lambda one: script[one.id])
    for number in range(2):
        one = request(number, 3, 4)
        one.end_token_ids = frozenset([3, 5])
        engine.submit(one)
    ended = drain(engine)
    assert [(one.output_token_ids, one.finish_reason) for one in ended] == [([3], "stop"), ([5], "stop")]


def test_timings_are_in_order() -> None:
    engine = executor()
    engine.submit(one := request(0, 3, 3))
    engine.step()
    assert one.timings.first_token is not None
    assert one.timings.finished is None
    drain(engine)
    assert one.timings.finished is not None
    assert one.timings.submitted <= one.timings.first_token <= one.timings.finished


def test_a_listener_may_finish_a_request() -> None:
    engine = executor()

    def stop_third(one: Request) -> None:
        if len(one.output_token_ids) == 3:
            one.finish("stop")

    engine.set_listener(stop_third)
    engine.submit(one := request(0, 3, 50))
    engine.submit(other := request(1, 3, 2))
    assert drain(engine) == [other, one]
    assert (one.finish_reason, len(one.output_token_ids)) == ("stop", 3)
    assert (other.finish_reason, len(other.output_token_ids)) == ("length", 2)
    assert_empty(engine)


@pytest.mark.parametrize("steps", range(5))
def test_cancel_in_every_state(steps: int) -> None:
    """Waiting, in the middle of the prompt, generating: nothing is left, and the other request ends as it would."""
    engine = executor(max_num_tokens=8)
    engine.submit(one := request(0, 12, 4))
    engine.submit(other := request(1, 9, 3))
    for _ in range(steps):
        engine.step()
    state, produced = one.state, list(one.output_token_ids)
    engine.cancel(one)
    assert one.finish_reason == ("length" if state is RequestState.COMPLETE else "cancelled")
    assert one.output_token_ids == produced
    engine.cancel(one)
    drain(engine)
    assert (other.finish_reason, other.output_token_ids) == ("length", [7, 7, 7])
    assert_empty(engine)


def test_cancelling_lets_the_next_one_in() -> None:
    engine = executor(blocks=4)
    engine.submit(one := request(0, 12, 4))
    engine.submit(request(1, 12, 4))
    engine.step()
    assert runner(engine).steps == [{0: 12}]
    engine.cancel(one)
    engine.step()
    assert runner(engine).steps[1:] == [{1: 12}]


def test_a_stranger_can_be_cancelled() -> None:
    engine = executor()
    engine.cancel(request(5, 3, 3))
    assert_empty(engine)


def test_what_can_never_start_is_refused_instead_of_waiting_for_ever() -> None:
    engine = executor(blocks=3)
    engine.submit(one := request(0, 12, 4))
    engine.submit(other := request(1, 3, 1))
    assert engine.step() == [one]
    assert one.finish_reason == "error"
    assert one.error == "the request needs 4 KV blocks to completion and the pool has 3."
    assert drain(engine) == [other]
    assert_empty(engine)


def test_shutdown_cancels_whatever_is_inside() -> None:
    engine = executor(max_num_tokens=4)
    members = [request(number, 6, 4) for number in range(3)]
    for one in members:
        engine.submit(one)
    engine.step()
    engine.shutdown()
    assert {one.finish_reason for one in members} == {"cancelled"}
    assert runner(engine).released
    assert cast("Any", engine.kv.pool).released


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("device-side"), AllocationError(512, 0, owner="activations"), ValueError("x")]
)
def test_a_failed_forward_fails_its_batch_and_the_rest_goes_on(error: Exception) -> None:
    engine = executor(max_batch_size=2)
    members = [request(number, 5, 3) for number in range(4)]
    for one in members:
        engine.submit(one)
    engine.step()
    runner(engine).faults.append(error)
    assert engine.step() == members[:2]
    assert [one.finish_reason for one in members[:2]] == ["error", "error"]
    assert members[0].error == f"{type(error).__name__}: {error}"
    assert engine.last_error is error
    assert engine.counters.failed_steps == 1
    drain(engine)
    assert [one.finish_reason for one in members[2:]] == ["length", "length"]
    assert_empty(engine)


@pytest.mark.parametrize("manager", ["slots", "kv"])
def test_a_manager_that_has_no_room_fails_only_the_request_it_names(
    manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = executor()
    engine.submit(first := request(1, 5, 3))
    engine.submit(second := request(2, 5, 3))
    target = getattr(engine, manager)
    original = target.prepare
    kind = NoFreeSlotsError if manager == "slots" else CapacityError

    def no_room_for_two(batch: ScheduledBatch) -> None:
        original(batch)
        if second in batch.requests:
            raise kind("request 2 finds no room", request_id=2, needed=1)

    monkeypatch.setattr(target, "prepare", no_room_for_two)
    assert engine.step() == [second]
    assert second.error == f"{kind.__name__}: request 2 finds no room"
    drain(engine)
    assert (first.finish_reason, first.output_token_ids) == ("length", [7, 7, 7])
    assert_empty(engine)


def test_no_room_for_a_stranger_fails_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = executor()
    engine.submit(one := request(1, 5, 3))

    def no_room(batch: ScheduledBatch) -> None:
        raise CapacityError("no room", request_id=99)

    monkeypatch.setattr(engine.kv, "prepare", no_room)
    assert engine.step() == [one]
    assert_empty(engine)


@pytest.mark.parametrize("manager", ["slots", "kv"])
def test_any_other_failure_while_preparing_fails_the_batch(manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = executor(max_batch_size=1)
    engine.submit(first := request(1, 5, 3))
    engine.submit(second := request(2, 5, 3))

    with monkeypatch.context() as broken:
        broken.setattr(getattr(engine, manager), "prepare", lambda batch: 1 / 0)
        assert engine.step() == [first]
    assert first.error == "ZeroDivisionError: division by zero"
    drain(engine)
    assert second.finish_reason == "length"
    assert_empty(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_listener_that_raises_leaks_nothing(error: type[BaseException]) -> None:
    engine = executor()

    def listener(one: Request) -> None:
        if one.id == 1:
            raise error

    engine.set_listener(listener)
    members = [request(number, 5, 1) for number in range(2)]
    for one in members:
        engine.submit(one)
    try:
        engine.step()
    except error:
        for one in members:
            engine.cancel(one)
    assert_empty(engine)


# -- random lives -------------------------------------------------------------------------------------------------


class Contents(ScriptedRunner):
    """Writes into every slot what its K/V would depend on, the whole text up to there, and reads all of it back."""

    def __init__(self, engine: Executor, script: Callable[[Request], int]) -> None:
        super().__init__(script)
        self.engine = engine
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.mixed_up: list[tuple[int, int]] = []

    def forward(self, batch: ScheduledBatch) -> None:
        super().forward(batch)
        kv = self.engine.kv
        for one in batch.requests:
            text, table = one.prompt_token_ids + one.output_token_ids, kv.block_table(one)
            reached = one.computed_tokens + len(one.tokens_of_step())
            for position in range(reached):
                slot = table[position // kv.tokens_per_block], position % kv.tokens_per_block
                if position >= one.computed_tokens:
                    self.slots[slot] = tuple(text[: position + 1])
                if self.slots.get(slot) != tuple(text[: position + 1]):
                    self.mixed_up.append((one.id, position))


moves = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("fail"), st.sampled_from([RuntimeError, MemoryError])),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=12,
    max_size=60,
)


@given(moves, st.integers(1, 24), st.integers(1, 4), st.booleans(), st.booleans())
def test_random_lives_end_with_full_pools(
    moves: list[tuple[Any, ...]], max_tokens: int, seats: int, chunked: bool, reuse: bool
) -> None:
    """Requests that share prefixes come, end, fail and are cancelled; nothing leaks and no K/V is mixed up."""
    engine = executor(
        blocks=14, max_num_tokens=max_tokens, max_batch_size=seats, enable_chunked_prefill=chunked,
        enable_block_reuse=reuse,
    )  # fmt: skip
    contents = Contents(engine, lambda one: END if one.total_tokens % 7 == 0 else 30 + one.total_tokens % 3)
    engine.runner = cast("Any", contents)
    members: list[Request] = []
    ended: list[Request] = []
    for move in moves:
        if move[0] == "submit":
            _, prompt, new, family = move
            if not chunked and prompt > max_tokens:
                continue
            one = Request(
                len(members), [9] * min(family * 4, prompt) + [family] * max(0, prompt - family * 4),
                SamplingParams(), max_new_tokens=new, end_token_ids=frozenset([END]),
            )  # fmt: skip
            members.append(one)
            engine.submit(one)
        elif move[0] == "cancel" and members:
            engine.cancel(members[move[1] % len(members)])
        elif move[0] == "fail" and engine.has_work:
            contents.faults.append(move[1]("injected"))
        elif move[0] == "step":
            for _ in range(move[1]):
                ended += engine.step()
    ended += drain(engine)
    assert_empty(engine)
    assert not contents.mixed_up
    assert len({one.id for one in ended}) == len(ended)
    assert all(one.finish_reason in ("stop", "length", "error", "cancelled") for one in members)
    assert {one.id for one in members if one.finish_reason != "cancelled"} == {one.id for one in ended}
    for one in members:
        assert one.finish_reason != "error" or "injected" in (one.error or "")
        if one.finish_reason == "length":
            assert len(one.output_token_ids) == one.max_new_tokens
        if one.finish_reason == "stop":
            assert one.output_token_ids[-1] == END


def test_a_prompt_again_computes_only_what_no_full_block_holds() -> None:
    """Sixteen tokens are four full blocks, but the last token's logits are wanted, so the last block is computed."""
    engine = executor()
    for number, (prompt, computed) in enumerate([(16, 16), (16, 4), (17, 1), (15, 3), (3, 3)]):
        engine.submit(Request(number, [9] * prompt, SamplingParams(), max_new_tokens=1))
        drain(engine)
        assert runner(engine).steps[-1] == {number: computed}
    assert engine.counters.reused_tokens == 12 + 16 + 12
    assert_empty(engine)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10)), min_size=1, max_size=8), st.integers(1, 64))
def test_tokens_do_not_depend_on_company(load: list[tuple[int, int]], max_tokens: int) -> None:
    """A script that hashes all a request has seen gives the same answer alone and beside others."""

    def script(one: Request) -> int:
        return hash((tuple(one.prompt_token_ids), tuple(one.output_token_ids))) % 1000 + 3

    together = executor(blocks=100, script=script, max_num_tokens=max_tokens)
    members = [request(number, prompt, new) for number, (prompt, new) in enumerate(load)]
    for one in members:
        together.submit(one)
    drain(together)
    for number, (prompt, new) in enumerate(load):
        alone = executor(blocks=100, script=script)
        alone.submit(one := request(number, prompt, new))
        drain(alone)
        assert one.output_token_ids == members[number].output_token_ids
