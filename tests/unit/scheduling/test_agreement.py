"""Ranks with requests of their own stay in step: simulated ranks, each in a thread, that meet in every exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams, ScheduledBatch
from onebudget.devtools.scripted import ScriptedRunner, scripted_executor
from onebudget.engine.executor import Executor
from onebudget.errors import AgreementError, CapacityError, StateError
from onebudget.scheduling.agreement import Alone, AttentionDataParallel
from onebudget.scheduling.filters import ContextBalance

RANKS = 4


class Exchange:
    """All-gather between threads; notes the names of the exchanges as each rank made them."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._values: list[Any] = [None] * ranks
        self.calls: list[list[str]] = [[] for _ in range(ranks)]

    def of(self, rank: int) -> Callable[[str, Any], list[Any]]:
        def gather(name: str, value: Any) -> list[Any]:
            self.calls[rank].append(name)
            self._values[rank] = (name, value)
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            assert {kind for kind, _ in found} == {name}, found
            return [each for _, each in found]

        return gather

    def abort(self) -> None:
        self._barrier.abort()


class MeetingRunner(ScriptedRunner):
    """Its forward exchanges tokens with the other ranks, as expert layers do."""

    gather: Callable[[str, Any], list[Any]]
    batches: list[list[int]]

    def forward(self, batch: ScheduledBatch) -> None:
        self.batches.append([one.id for one in batch.requests])
        self.gather("forward", batch.size)
        super().forward(batch)


def rank_of(exchange: Exchange, rank: int, *, balance: bool = False, **knobs: Any) -> Executor:
    config = BudgetConfig(**{"max_seq_len": 128, "max_num_tokens": 16, "tokens_per_block": 4, **knobs})
    gather = exchange.of(rank)
    engine: Executor
    agreement = AttentionDataParallel(gather, lambda ids: engine.kv.add_dummy_requests(ids, generation=True, tokens=2))
    engine = scripted_executor(config, 24, agreement=agreement)
    runner = MeetingRunner(lambda one: 7)
    runner.gather, runner.batches = gather, []
    engine.runner = cast("Any", runner)
    if balance:
        engine.scheduler._filters.insert(0, ContextBalance(lambda value: gather("balance", value), iterations=3))
    return engine


def serve(engine: Executor, load: list[tuple[int, int, int]], steps: int, faults: set[int]) -> list[Request]:
    """A fixed number of steps on every rank: whoever has nothing to do takes part."""
    members = [
        (Request(number, [number + 2] * prompt, SamplingParams(), max_new_tokens=new), arrival)
        for number, (prompt, new, arrival) in enumerate(load)
    ]
    original = engine.kv.prepare
    for step in range(steps):
        for one, arrival in members:
            if arrival == step:
                engine.submit(one)

        def prepare(batch: ScheduledBatch, step: int = step) -> None:
            if step in faults and not batch.requests[0].is_dummy:
                raise CapacityError("injected", request_id=batch.requests[0].id)
            original(batch)

        engine.kv.prepare = prepare  # type: ignore[method-assign]
        engine.step()
    return [one for one, _ in members]


def run(engines: list[Executor], work: Callable[[int, Executor], Any], exchange: Exchange) -> list[Any]:
    results: list[Any] = [None] * len(engines)
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank, engines[rank])
        except BaseException as error:
            errors.append(error)
            exchange.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results


loads = st.lists(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 25)), max_size=5),
    min_size=RANKS, max_size=RANKS,
)  # fmt: skip


failing_steps = st.sets(st.tuples(st.integers(0, RANKS - 1), st.integers(0, 40)), max_size=4)


@settings(max_examples=25)
@given(loads, st.booleans(), st.booleans(), failing_steps)
def test_every_rank_makes_the_same_exchanges_in_the_same_order(
    load: list[list[tuple[int, int, int]]], overlap: bool, balance: bool, faults: set[tuple[int, int]]
) -> None:
    exchange = Exchange(RANKS)
    engines = [rank_of(exchange, rank, overlap=overlap, balance=balance) for rank in range(RANKS)]
    steps = 260
    members = run(engines, lambda rank, e: serve(e, load[rank], steps, {s for r, s in faults if r == rank}), exchange)
    assert all(calls == exchange.calls[0] for calls in exchange.calls)
    for engine, requests in zip(engines, members, strict=True):
        assert all(one.finish_reason in ("length", "error") for one in requests)
        assert all(len(one.output_token_ids) == one.max_new_tokens for one in requests if one.finish_reason == "length")
        assert not engine.has_work
        engine.kv.reset_reuse()
        assert engine.kv.free_blocks == 24
        assert engine.slots.free_slots == engine.slots.max_resource_count()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_idle_rank_joins_with_a_dummy_that_leaves_no_trace(overlap: bool) -> None:
    exchange = Exchange(2)
    engines = [rank_of(exchange, rank, overlap=overlap) for rank in range(2)]
    members = run(engines, lambda rank, e: serve(e, [(6, 3, 0)] if rank == 0 else [], 6, set()), exchange)
    assert members[0][0].output_token_ids == [7, 7, 7]
    runners = [cast("MeetingRunner", engine.runner) for engine in engines]
    assert runners[0].batches == [[0], [0], [0]]
    assert len(runners[1].batches) == 3 and all(number < 0 for batch in runners[1].batches for number in batch)
    assert engines[1].kv.used_blocks == 0
    assert engines[1].slots.free_slots == engines[1].slots.max_resource_count()
    agreement = cast("AttentionDataParallel", engines[1]._moments.agreement)
    assert (agreement.padded_steps, agreement.padding) == (3, [])


def test_a_rank_without_room_for_a_dummy_makes_everybody_wait() -> None:
    exchange = Exchange(2)
    engines = [rank_of(exchange, rank) for rank in range(2)]
    engines[1]._moments.agreement._make_dummies = lambda ids: None  # type: ignore[union-attr]
    members = run(engines, lambda rank, e: serve(e, [(6, 3, 0)] if rank == 0 else [], 6, set()), exchange)
    assert cast("MeetingRunner", engines[0].runner).batches == []
    assert not members[0][0].finished
    assert cast("AttentionDataParallel", engines[0]._moments.agreement).postponed_steps == 6
    engines[1]._moments.agreement._make_dummies = lambda ids: engines[1].kv.add_dummy_requests(  # type: ignore[union-attr]
        ids, generation=True, tokens=2
    )
    run(engines, lambda rank, e: [e.step() for _ in range(6)], exchange)
    assert members[0][0].finish_reason == "length"


def test_after_the_vote_a_rank_without_room_for_a_dummy_ends_all() -> None:
    agreement = AttentionDataParallel(lambda name, value: [value], lambda ids: None)
    with pytest.raises(AgreementError, match="no KV block is free for the dummy"):
        agreement.stand_in(ScheduledBatch())


def broken(batch: ScheduledBatch) -> None:
    raise ValueError("no number")


def alone_with_agreement(overlap: bool) -> Executor:
    engine = rank_of(Exchange(1), 0, overlap=overlap, max_batch_size=1)
    for number in range(12):
        engine.submit(Request(number, [number + 2] * 6, SamplingParams(), max_new_tokens=2))
    return engine


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forward_that_fails_is_not_for_this_rank_to_settle(overlap: bool) -> None:
    engine = alone_with_agreement(overlap)
    engine.runner.forward = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="no number"):
        engine.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_that_fails_too_often_does_not_stop_silently(overlap: bool) -> None:
    engine = alone_with_agreement(overlap)
    engine.runner.sample = lambda batch, *_: broken(batch)  # type: ignore[assignment, method-assign]
    assert [one.id for _ in range(9) for one in engine.step()] == list(range(9))
    with pytest.raises(StateError, match="the engine stopped after 10 failed steps"):
        engine.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_batch_of_one_stays_one_beside_the_seat_of_a_dummy(overlap: bool) -> None:
    engine = alone_with_agreement(overlap)
    assert engine.slots.max_resource_count() == 2
    while engine.has_work:
        engine.step()
    assert max(map(len, cast("MeetingRunner", engine.runner).batches)) == 1
    assert engine.slots.free_slots == 2


def test_a_failure_on_one_rank_is_everybodys_for_the_same_request() -> None:
    exchange = Exchange(2)
    gathers = [exchange.of(rank) for rank in range(2)]
    agreements = [AttentionDataParallel(gather, lambda ids: None) for gather in gathers]
    found = run(cast("Any", agreements), lambda rank, a: a.end_step([3, 4] if rank else [5]), exchange)
    assert found == [{3, 4, 5}, {3, 4, 5}]


def test_alone_there_is_nobody_to_ask() -> None:
    alone = Alone()
    assert (alone.can_queue(0), alone.can_queue(1), alone.end_step([4])) == (False, True, {4})
    batch = ScheduledBatch()
    alone.begin_step(True)
    alone.pad(batch)
    alone.stand_in(batch)
    assert batch.size == 0 and alone.padding == []
