"""The overlap loop: the order of its moments, and that nothing else differs from the plain loop."""

from __future__ import annotations

import random
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
from onebudget.errors import CapacityError, NoFreeSlotsError
from onebudget.resources import SequenceSlotManager
from onebudget.resources.kv.choice import kv_manager
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.tier import CountedTier

END = 2


def seven(request: Request) -> int:
    return 7


def executor(
    blocks: int = 16, script: Callable[[Request], int] = seven, *, options: dict[str, Any] | None = None, **knobs: Any
) -> Executor:
    config = BudgetConfig(**{"max_seq_len": 256, "max_num_tokens": 64, "tokens_per_block": 4, **knobs})
    return scripted_executor(config, blocks, script, **(options or {}))


def runner(engine: Executor) -> ScriptedRunner:
    return cast("ScriptedRunner", engine.runner)


def request(number: int, prompt: int, new: int, **params: Any) -> Request:
    return Request(
        number, [10 + number] * prompt, SamplingParams(**params), max_new_tokens=new, end_token_ids=frozenset([END])
    )


def drain(engine: Executor, limit: int = 2000) -> list[Request]:
    ended = []
    while engine.has_work:
        ended += engine.step()
        limit -= 1
        assert limit, "the loop does not end"
    return ended


def assert_empty(engine: Executor) -> None:
    engine.kv.reset_reuse()
    assert not engine.has_work
    assert engine.kv.free_blocks == engine.kv.max_resource_count()
    assert engine.slots.free_slots == engine.slots.max_resource_count()


# -- the order of the moments -------------------------------------------------------------------------------------


class Trace:
    """Notes what happens at each moment, by wrapping managers, runner and loop."""

    def __init__(self, engine: Executor) -> None:
        self.lines: list[str] = []
        moments = engine._moments
        self._watch(engine.scheduler, "schedule", self._scheduled, after=True)
        for name, manager in (("slot", engine.slots), ("kv", engine.kv)):
            for hook in ("prepare", "update", "free"):
                self._watch(manager, hook, f"{hook} {name}")
        self._watch(moments.model, "forward", "forward")
        self._watch(moments.model, "sample", "sample")
        self._watch(moments.model, "read", "read")
        self._watch(moments, "launched", "states")
        engine.set_listener(lambda one: self.lines.append(f"token {one.id}"))

    def _scheduled(self, batch: ScheduledBatch) -> str:
        parts = {"ctx": batch.context, "gen": batch.generation}
        found = [f"{name} {[one.id for one in members]}" for name, members in parts.items() if members]
        return f"sched {' '.join(found) or '-'}"

    def _watch(self, target: object, hook: str, label: str | Callable[[Any], str], *, after: bool = False) -> None:
        original = getattr(target, hook)

        def noted(*args: Any) -> Any:
            if after:
                result = original(*args)
                self.lines.append(cast("Callable[[Any], str]", label)(result))
                return result
            which = [one.id for one in args[0].requests] if isinstance(args[0], ScheduledBatch) else args[0].id
            self.lines.append(f"{label} {which}")
            return original(*args)

        setattr(target, hook, noted)

    def take(self) -> list[str]:
        lines, self.lines[:] = list(self.lines), []
        return lines


def traced(script: Callable[[Request], int] = seven, **knobs: Any) -> tuple[Executor, Trace]:
    publish: list[ScheduledBatch] = []
    engine = executor(script=script, options={"publish": publish.append}, **knobs)
    trace = Trace(engine)
    fit = engine.resources._fit
    engine.resources._fit = lambda batch: (trace.lines.append("trim"), fit(batch))  # type: ignore[misc]
    engine.resources._publish = lambda batch: trace.lines.append("publish")
    return engine, trace


def prepare(*ids: int) -> list[str]:
    listed = list(ids)
    return [f"prepare slot {listed}", f"prepare kv {listed}", "trim", "publish"]


def settle(*, free: int | None = None, update: list[int]) -> list[str]:
    freed = [] if free is None else [f"free kv {free}", f"free slot {free}"]
    return [*freed, f"update slot {update}", f"update kv {update}"]


def test_plain_loop() -> None:
    engine, trace = traced(overlap=False)
    engine.submit(request(1, 8, 2))
    engine.submit(request(2, 4, 1))
    engine.step()
    assert trace.take() == [
        "sched ctx [1, 2]", *prepare(1, 2), "forward [1, 2]", "sample [1, 2]", "read [1, 2]", "states [1, 2]",
        "token 1", "token 2", *settle(free=2, update=[1, 2]),
    ]  # fmt: skip
    engine.step()
    assert trace.take() == [
        "sched gen [1]", *prepare(1), "forward [1]", "sample [1]", "read [1]", "states [1]", "token 1",
        *settle(free=1, update=[1]),
    ]  # fmt: skip
    engine.step()
    assert trace.take() == ["sched -"]
    assert_empty(engine)


def test_overlap_with_an_end_that_is_certain() -> None:
    """R2's only token is certain, so the second step leaves it out before anybody has seen the token."""
    engine, trace = traced()
    engine.submit(first := request(1, 8, 2))
    engine.submit(second := request(2, 4, 1))
    assert engine.step() == []
    assert trace.take() == ["sched ctx [1, 2]", *prepare(1, 2), "forward [1, 2]", "sample [1, 2]", "states [1, 2]"]
    assert (first.state, second.state) == (RequestState.GENERATION, RequestState.TO_COMPLETE)
    assert engine.step() == [second]
    assert trace.take() == [
        "sched gen [1]", *prepare(1), "forward [1]", "read [1, 2]", "token 1", "token 2", "sample [1]", "states [1]",
        *settle(free=2, update=[1, 2]),
    ]  # fmt: skip
    assert first.state is RequestState.TO_COMPLETE
    assert engine.step() == [first]
    assert trace.take() == ["sched -", "read [1]", "token 1", *settle(free=1, update=[1])]
    assert engine.step() == []
    assert_empty(engine)


def test_overlap_with_an_end_that_nobody_could_foresee() -> None:
    """R2 ends by a token; the step after was launched with it, and what that sampled is dropped."""
    engine, trace = traced(script=lambda one: END if one.id == 2 else 7)
    engine.submit(request(1, 8, 3))
    engine.submit(second := request(2, 4, 5))
    engine.step()
    trace.take()
    held = len(engine.kv.block_table(second))
    assert engine.step() == [second]
    assert trace.take() == [
        "sched gen [1, 2]", *prepare(1, 2), "forward [1, 2]", "read [1, 2]", "token 1", "token 2", "sample [1, 2]",
        "states [1, 2]", *settle(free=2, update=[1, 2]),
    ]  # fmt: skip
    assert held == 1 and second.output_token_ids == [END]
    assert len(engine.step()) == 0
    assert trace.take() == [
        "sched gen [1]", *prepare(1), "forward [1]", "read [1, 2]", "token 1", "sample [1]", "states [1]",
        *settle(update=[1, 2]),
    ]  # fmt: skip
    drain(engine)
    assert_empty(engine)


def test_the_slot_of_a_request_that_ended_is_free_a_step_later() -> None:
    engine = executor(script=lambda one: END)
    engine.submit(request(1, 4, 5))
    engine.step()
    free = engine.slots.free_slots
    engine.step()
    assert engine.slots.free_slots == free + 1
    assert_empty(engine)


# -- seats --------------------------------------------------------------------------------------------------------


def backfill(seats: int, *, headroom: bool) -> Executor:
    """One request ends by length in the first step; another waits for its place of the single one there is."""
    engine = executor(max_batch_size=1, options={"slots": SequenceSlotManager(seats), "headroom": headroom}, blocks=32)
    engine.submit(request(1, 4, 1))
    engine.submit(request(2, 4, 1))
    return engine


def test_one_set_of_seats_suffices_while_an_unprocessed_request_counts_as_seated() -> None:
    engine = backfill(1, headroom=False)
    assert [one.finish_reason for one in drain(engine)] == ["length", "length"]
    assert runner(engine).steps == [{1: 4}, {2: 4}]
    assert_empty(engine)


def test_without_that_rule_one_set_collides() -> None:
    """The second is admitted while the first, whose token is on its way, still has the only slot."""
    engine = backfill(1, headroom=True)
    ended = drain(engine)
    assert [one.finish_reason for one in ended] == ["length", "error"]
    assert isinstance(engine.last_error, NoFreeSlotsError)
    assert_empty(engine)


def test_a_second_set_lets_the_next_one_in_early() -> None:
    engine = backfill(2, headroom=True)
    assert [one.finish_reason for one in drain(engine)] == ["length", "length"]
    assert runner(engine).steps == [{1: 4}, {2: 4}]
    assert_empty(engine)


def test_seats_are_counted_once_for_all_who_need_them() -> None:
    assert executor(max_batch_size=5, options={"headroom": True}).slots.max_resource_count() == 10
    assert executor(max_batch_size=5, options={"headroom": True}, overlap=False).slots.max_resource_count() == 5
    assert executor(max_batch_size=5).slots.max_resource_count() == 5


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=20), st.integers(1, 4))
def test_random_backfill_with_two_sets_never_lacks_a_seat(load: list[tuple[int, int]], places: int) -> None:
    script = random.Random(len(load)).choice
    engine = executor(
        blocks=200, max_batch_size=places, options={"headroom": True}, script=lambda one: script([7, 7, END])
    )
    for number, (prompt, new) in enumerate(load):
        engine.submit(request(number, prompt, new))
    assert {one.finish_reason for one in drain(engine)} <= {"length", "stop"}
    assert engine.last_error is None
    assert_empty(engine)


# -- the same tokens ----------------------------------------------------------------------------------------------


def spoken(one: Request) -> int:
    """Depends on everything the request has seen; now and then the end."""
    token = hash((tuple(one.prompt_token_ids), tuple(one.output_token_ids))) % 17
    return token if token > 3 else END


loads = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=10)


@given(
    loads,
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    st.booleans(),
)
def test_tokens_of_both_loops(
    load: list[tuple[int, int, int]], tokens: int, places: int, policy: str, chunked: bool
) -> None:
    answers = []
    for overlap in (True, False):
        engine = executor(
            blocks=16, script=spoken, max_num_tokens=tokens, max_batch_size=places, overlap=overlap,
            scheduler_policy=policy, enable_chunked_prefill=chunked,
        )  # fmt: skip
        members = [
            Request(
                number, [9] * min(prompt, 4 * family) + [number] * max(0, prompt - 4 * family), SamplingParams(),
                max_new_tokens=new, end_token_ids=frozenset([END]),
            )
            for number, (prompt, new, family) in enumerate(load)
            if chunked or prompt <= tokens
        ]  # fmt: skip
        for one in members:
            engine.submit(one)
        ended = drain(engine)
        assert sorted(one.id for one in ended) == [one.id for one in members]
        assert all(one.finish_reason in ("stop", "length") for one in members)
        answers.append([one.output_token_ids for one in members])
        assert_empty(engine)
    assert answers[0] == answers[1]


# -- pauses, cancels, failures between launch and processing ------------------------------------------------------


def test_a_request_paused_while_its_token_is_on_its_way_keeps_the_token() -> None:
    """Two requests grow until one block is lacking; the later one starts over with all it has said."""
    said = iter(range(100, 200))
    engine = executor(blocks=5, script=lambda one: next(said), scheduler_policy="max_utilization")
    engine.submit(first := request(1, 6, 8))
    engine.submit(second := request(2, 6, 8))
    tokens: list[int] = []
    paused = False
    while engine.has_work:
        before = list(second.output_token_ids)
        engine.step()
        assert second.output_token_ids[: len(before)] == before
        paused = paused or second.pauses > 0
        tokens = second.output_token_ids
    assert paused and not first.pauses
    assert len(first.output_token_ids) == len(tokens) == 8
    assert_empty(engine)
    assert engine.counters.paused == second.pauses


@pytest.mark.parametrize("overlap", [True, False])
def test_a_suspended_request_comes_back_however_long_its_prompt_was(overlap: bool) -> None:
    """It needs room for its next token, not once more for the prompt that it computed in one piece."""
    config = BudgetConfig(
        max_seq_len=256, max_num_tokens=64, tokens_per_block=4, overlap=overlap, kv_cache_manager="v2",
    )  # fmt: skip
    store = CountedStore(12, 4)
    kv = kv_manager([KVGroup(store, near=CountedTier("host", 12))], config)
    engine = Executor(config, cast("Any", ScriptedRunner(seven)), kv)
    engine.submit(first := request(1, 4, 12))
    engine.submit(second := request(2, 36, 12))
    drain(engine)
    assert (engine.counters.resumed, second.pauses) == (1, 1)
    assert [len(one.output_token_ids) for one in (first, second)] == [12, 12]
    assert_empty(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_who_finds_no_blocks_gives_way_where_pausing_is_the_policy(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = executor(scheduler_policy="max_utilization", overlap=overlap)
    members = [request(number, 5, 4) for number in range(2)]
    for one in members:
        engine.submit(one)
    engine.step()
    original = engine.kv.prepare
    with monkeypatch.context() as full:

        def no_room(batch: ScheduledBatch) -> None:
            original(batch)
            raise CapacityError("no room", request_id=1)

        full.setattr(engine.kv, "prepare", no_room)
        assert engine.step() == []
    assert members[1].pauses == 1 and list(engine.scheduler.waiting) == [members[1]]
    drain(engine)
    assert [one.output_token_ids for one in members] == [[7] * 4] * 2
    assert engine.counters.failed_steps == 0
    assert_empty(engine)


@pytest.mark.parametrize("steps", range(6))
def test_cancel_between_launch_and_processing(steps: int) -> None:
    engine = executor(max_num_tokens=8)
    engine.submit(one := request(0, 12, 4))
    engine.submit(other := request(1, 9, 3))
    ended: list[Request] = []
    for _ in range(steps):
        ended += engine.step()
    produced, finished = list(one.output_token_ids), one.finished
    engine.cancel(one)
    assert one.output_token_ids == produced
    engine.cancel(one)
    ended += drain(engine)
    assert one.output_token_ids == produced
    assert (one in ended) == finished
    assert (other.finish_reason, other.output_token_ids) == ("length", [7, 7, 7])
    assert_empty(engine)


def test_cancelling_the_last_one_leaves_nothing_in_flight() -> None:
    engine = executor()
    engine.submit(one := request(0, 12, 4))
    engine.step()
    engine.cancel(one)
    assert_empty(engine)


def test_drain_counts_what_was_launched() -> None:
    engine = executor()
    engine.submit(one := request(0, 12, 1))
    engine.submit(other := request(1, 12, 3))
    assert engine.step() == []
    engine.drain()
    assert one.finish_reason == "length" and len(other.output_token_ids) == 1
    assert engine.step() == [one]
    assert drain(engine) == [other]
    assert_empty(engine)


@pytest.mark.parametrize("place", ["faults", "sampling_faults"])
def test_a_failed_step_does_not_touch_the_one_before(place: str) -> None:
    engine = executor(max_batch_size=4)
    members = [request(number, 5, 6) for number in range(2)]
    for one in members:
        engine.submit(one)
    engine.step()
    getattr(runner(engine), place).append(RuntimeError("broken"))
    assert engine.step() == members
    for one in members:
        assert (one.error, one.output_token_ids) == ("RuntimeError: broken", [7])
    assert_empty(engine)


def test_a_step_without_room_for_one_computes_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = executor()
    engine.submit(first := request(1, 5, 4))
    engine.submit(second := request(2, 5, 4))
    engine.step()
    original = engine.kv.prepare
    with monkeypatch.context() as full:

        def no_room(batch: ScheduledBatch) -> None:
            original(batch)
            raise CapacityError("no room", request_id=2)

        full.setattr(engine.kv, "prepare", no_room)
        assert engine.step() == [second]
    assert second.output_token_ids == [7]
    drain(engine)
    assert (first.finish_reason, first.output_token_ids) == ("length", [7] * 4)
    assert_empty(engine)


def test_tokens_that_cannot_be_read_end_both_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = executor()
    engine.submit(first := request(1, 5, 4))
    engine.step()
    engine.submit(second := request(2, 5, 4))
    monkeypatch.setattr(engine._moments.model, "read", lambda *_: 1 / 0)
    ended = engine.step()
    assert set(ended) == {first, second} and len(ended) == 2
    assert all(one.finish_reason == "error" for one in ended)
    assert_empty(engine)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_listener_that_raises(error: type[BaseException]) -> None:
    """An error ends its request; an interrupt waits until the step is through, so the other goes on as if nothing
    had been."""
    engine = executor()

    def listener(one: Request) -> None:
        if one.id == 0 and len(one.output_token_ids) == 2:
            raise error("heard enough")

    engine.set_listener(listener)
    engine.submit(loud := request(0, 5, 5))
    engine.submit(quiet := request(1, 5, 5))
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == (error is KeyboardInterrupt)
    assert (quiet.finish_reason, quiet.output_token_ids) == ("length", [7] * 5)
    if error is RuntimeError:
        assert (loud.finish_reason, loud.error) == ("error", "RuntimeError: heard enough")
        assert len(loud.output_token_ids) == 2
    assert_empty(engine)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("fail"), st.sampled_from(["faults", "sampling_faults"])),
        st.tuples(st.just("drain")),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=12,
    max_size=60,
)


@given(
    moves, st.integers(1, 24), st.integers(1, 4), st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_random_lives(
    moves: list[tuple[Any, ...]], max_tokens: int, places: int, policy: str, overlap: bool, reuse: bool
) -> None:
    """Every request ends exactly once, in one way, and nothing is left of it."""
    engine = executor(
        blocks=14, max_num_tokens=max_tokens, max_batch_size=places, scheduler_policy=policy, overlap=overlap,
        enable_block_reuse=reuse, script=spoken,
    )  # fmt: skip
    members: list[Request] = []
    ended: list[Request] = []
    for move in moves:
        if move[0] == "submit" and engine.stopped is None:
            _, prompt, new, family = move
            prompt_ids = [9] * min(family * 4, prompt) + [family] * max(0, prompt - family * 4)
            one = Request(
                len(members), prompt_ids, SamplingParams(), max_new_tokens=new, end_token_ids=frozenset([END])
            )
            members.append(one)
            engine.submit(one)
        elif move[0] == "cancel" and members:
            engine.cancel(members[move[1] % len(members)])
        elif move[0] == "fail":
            getattr(runner(engine), move[1])[:] = [RuntimeError("injected")]
        elif move[0] == "drain":
            engine.drain()
        elif move[0] == "step":
            for _ in range(move[1]):
                ended += engine.step()
    ended += drain(engine)
    ended += engine.step()
    assert_empty(engine)
    assert len({one.id for one in ended}) == len(ended)
    assert all(one.finish_reason in ("stop", "length", "error", "cancelled") for one in members)
    assert {one.id for one in members if one.finish_reason != "cancelled"} == {one.id for one in ended}
    for one in members:
        assert one.finish_reason != "error" or "injected" in (one.error or "")
        assert len(one.output_token_ids) <= one.max_new_tokens
        if one.finish_reason == "length":
            assert len(one.output_token_ids) == one.max_new_tokens
        if one.finish_reason == "stop":
            assert one.output_token_ids[-1] == END
