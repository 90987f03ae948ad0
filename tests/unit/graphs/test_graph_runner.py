"""The runner without a model: which batches get which graph, its states, padding, and what it gives back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.errors import AllocationError, ConfigError, StateError, UnknownKeyError
from onebudget.graphs.agreement import NO_GRAPH, Candidate, GraphAgreement
from onebudget.graphs.base import CapturedGraph, Forward, GraphBackend
from onebudget.graphs.keys import GraphKey, GraphState, Tier
from onebudget.graphs.padding import PaddingDummies, dummy_id
from onebudget.graphs.runner import CUDAGraphRunner
from onebudget.resources.base import BaseResourceManager


@dataclass
class Recorded(CapturedGraph):
    forward: Forward
    replays: int = 0
    alive: bool = True

    def __post_init__(self) -> None:
        self.outputs = self.forward()

    def replay(self) -> None:
        assert self.alive
        self.replays += 1

    def reset(self) -> None:
        self.alive = False
        self.outputs = ()


@dataclass
class Platform(GraphBackend):
    """Stands where CUDA or the host stand: a pool is the list of its captures."""

    fail: Callable[[int], Exception | None] = lambda number: None
    captures: int = 0
    released: list[Any] = field(default_factory=list)

    def capture(self, forward: Forward, pool: Any | None) -> tuple[CapturedGraph, Any]:
        self.captures += 1
        error = self.fail(self.captures)
        if error is not None:
            raise error
        pool = [] if pool is None else pool
        graph = Recorded(forward)
        pool.append(graph)
        return graph, pool

    def pool_bytes(self, pool: Any | None) -> int:
        return 0 if pool is None else 1000 * len(pool)

    def release_pool(self, pool: Any) -> None:
        assert not any(graph.alive for graph in pool)
        self.released.append(pool)


@dataclass
class Seats(BaseResourceManager):
    """A manager that holds one unit per sequence."""

    free_seats: int = 4
    held: set[int] = field(default_factory=set)

    def max_resource_count(self) -> int:
        return self.free_seats + len(self.held)

    def needed_to_completion(self, request: Request) -> int:
        return 1

    def add_dummy_requests(self, ids: Sequence[int], **shape: Any) -> list[Request] | None:
        assert shape["generation"]
        if len(ids) > self.free_seats:
            return None
        self.free_seats -= len(ids)
        self.held |= set(ids)
        return [generating(number) for number in ids]

    def free(self, request: Request) -> None:
        if request.id in self.held:
            self.held.remove(request.id)
            self.free_seats += 1


def generating(number: int, **params: Any) -> Request:
    request = Request(number, [1], SamplingParams(temperature=0, **params), max_new_tokens=9, computed_tokens=1)
    request.state, request.output_token_ids = RequestState.GENERATION, [5]
    return request


def prompt(number: int, tokens: int, cached: int = 0, chunk: int | None = None, **params: Any) -> Request:
    request = Request(number, [1] * tokens, SamplingParams(temperature=0, **params), max_new_tokens=9)
    request.state, request.computed_tokens = RequestState.CONTEXT, cached
    request.chunk_tokens = tokens - cached if chunk is None else chunk
    return request


def batch_of(*requests: Request) -> ScheduledBatch:
    batch = ScheduledBatch()
    for request in requests:
        batch.add(request)
    return batch


def decode(size: int) -> ScheduledBatch:
    return batch_of(*map(generating, range(size)))


def runner_of(
    platform: Platform | None = None, buckets: Sequence[int] = (1, 2, 4, 8), *, pads: bool = True, **options: Any
) -> CUDAGraphRunner:
    dummies = PaddingDummies([Seats()]) if pads else None
    return CUDAGraphRunner(
        platform or Platform(), buckets, max_batch_size=options.pop("max_batch_size", 8), dummies=dummies, **options
    )


PLAN = object()


def warm_up(runner: CUDAGraphRunner, forward: Forward = lambda: ()) -> None:
    for only in (True, False):
        with runner.allow_capture(warmup_only=only):
            for key in runner.capture_keys():
                runner.run(key, forward, PLAN)


def test_states_of_a_key() -> None:
    runner, calls = runner_of(buckets=[2]), []
    key = runner.capture_keys()[0]
    assert runner.state(key) is GraphState.NEW
    assert runner.graph_pool() is None

    def forward() -> tuple[()]:
        calls.append(runner.warmup_only)
        return ()

    with runner.allow_capture(warmup_only=True):
        runner.run(key, forward, PLAN)
    assert runner.state(key) is GraphState.WARM
    assert calls == [True]
    with runner.allow_capture():
        runner.run(key, forward, PLAN)
    assert calls == [True, False, False]  # once more before the capture, once inside it
    assert runner.state(key) is GraphState.CAPTURED
    assert runner.pool_bytes == 1000
    runner.replay(key, PLAN)
    assert runner.state(key) is GraphState.CAPTURED
    runner.clear()
    assert runner.state(key) is GraphState.NEW
    assert runner.graph_pool() is None


def test_captures_share_one_pool_and_clear_gives_it_back() -> None:
    platform = Platform()
    runner = runner_of(platform)
    warm_up(runner)
    pool = runner.graph_pool()
    assert pool is not None
    assert len(pool) == 4
    runner.clear()
    runner.clear()
    assert platform.released == [pool]
    assert runner.pool_bytes == 0
    warm_up(runner)
    assert runner.graph_pool() is not pool
    runner.replay(GraphKey(8), PLAN)


def test_capture_outside_of_warm_up_is_refused() -> None:
    runner = runner_of()
    with pytest.raises(StateError, match="warm-up"):
        runner.run(GraphKey(8), lambda: (), PLAN)


def test_replay_of_unknown_and_cleared_graphs() -> None:
    runner = runner_of()
    warm_up(runner)
    with pytest.raises(UnknownKeyError, match="8, 4, 2, 1"):
        runner.replay(GraphKey(3), PLAN)
    with pytest.raises(KeyError):
        runner.replay(GraphKey(8, tier=Tier.FAST), PLAN)
    with pytest.raises(AssertionError):
        runner.replay(GraphKey(8), object())
    runner.clear()
    with pytest.raises(StateError, match="cleared"):
        runner.replay(GraphKey(8), PLAN)


def test_a_failed_capture_leaves_its_key_eager(caplog: pytest.LogCaptureFixture) -> None:
    platform = Platform(fail=lambda number: RuntimeError("no") if number == 2 else None)
    runner = runner_of(platform)
    with caplog.at_level(logging.ERROR):
        warm_up(runner)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "batches of 4" in caplog.text
    assert runner.state(GraphKey(4)) is GraphState.EAGER_ONLY
    assert GraphKey(4) not in runner.metadata
    assert runner.choose(decode(3)) is None
    assert runner.choose(decode(8)) == GraphKey(8)
    warm_up(runner)
    assert runner.state(GraphKey(4)) is GraphState.EAGER_ONLY
    assert platform.captures == 4


def test_out_of_memory_names_bucket_pool_and_ways_out() -> None:
    full = AllocationError(500, 20, owner="graphs")
    runner = runner_of(Platform(fail=lambda number: full if number == 2 else None))
    with pytest.raises(AllocationError) as caught:
        warm_up(runner)
    text = str(caught.value)
    for part in ("batches of 4", "1000 B", "ends at 2", "free_gpu_memory_fraction"):
        assert part in text
    assert runner.state(GraphKey(4)) is GraphState.EAGER_ONLY


@pytest.mark.parametrize(
    ("batch", "eligible"),
    [
        (decode(3), True),
        (batch_of(), False),
        (batch_of(generating(0), prompt(1, 9)), False),
        (batch_of(generating(0), prompt(1, 9, chunk=4)), False),
        (batch_of(generating(0), prompt(1, 9, cached=8)), True),
        (batch_of(prompt(1, 1)), True),
        (batch_of(prompt(1, 9, cached=8, prompt_logprobs=0)), False),
        (batch_of(prompt(1, 9, cached=2, chunk=1)), False),
    ],
)
def test_eligible_batches(batch: ScheduledBatch, eligible: bool) -> None:
    runner = runner_of()
    warm_up(runner)
    assert runner.eligible(batch) is eligible
    assert (runner.choose(batch) is not None) is eligible


@pytest.mark.parametrize(("live", "padded"), [(1, 1), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_padded_size(live: int, padded: int) -> None:
    assert runner_of().padded_size(live) == padded
    assert runner_of(pads=False).padded_size(live) == live
    assert runner_of(enabled=False).padded_size(live) == live


def test_no_padding_beyond_the_batch_limit() -> None:
    assert runner_of(max_batch_size=6).padded_size(5) == 5


def test_misses_are_counted_and_stay_eager() -> None:
    runner = runner_of(pads=False)
    assert runner.choose(decode(2)) is None
    warm_up(runner)
    assert runner.choose(decode(3)) is None
    assert runner.misses == 2
    assert runner.choose(decode(4)) == GraphKey(4)
    assert GraphKey(3) not in runner.graphs


def test_tiers() -> None:
    runner = runner_of(tiers=[Tier.FULL, Tier.FAST])
    warm_up(runner)

    def tier(*requests: Request) -> Tier:
        key = runner.choose(batch_of(*requests))
        assert key is not None
        return key.tier

    sampling = generating(1)
    sampling.params = SamplingParams(temperature=1.0)
    assert tier(generating(0), generating(1)) is Tier.FAST
    assert tier(generating(0), sampling) is Tier.FULL
    assert tier(generating(0), generating(1, repetition_penalty=1.2)) is Tier.FULL
    assert tier(generating(0), prompt(1, 5, cached=4)) is Tier.FULL


@pytest.mark.parametrize(("longest", "bucket"), [(1, 128), (128, 128), (129, 256), (300, 300), (301, None)])
def test_length_buckets(longest: int, bucket: int | None) -> None:
    runner = runner_of(length_buckets=(128, 256, 300))
    warm_up(runner)
    key = runner.choose(decode(2), longest)
    assert (key and key.length_bucket) == bucket


def test_agreement_has_the_last_word() -> None:
    """Another rank with these rows: its padded size, then what it is ready for."""
    said: list[Candidate] = []
    other = iter([Candidate(True, 4), NO_GRAPH, Candidate(True, 8), Candidate(True, 8), Candidate(True, 4), NO_GRAPH])

    def gather(row: Sequence[int]) -> list[Sequence[int]]:
        said.append(Candidate.from_row(row))
        return [row, next(other).row]

    runner = runner_of(agreement=GraphAgreement(gather))
    warm_up(runner)
    assert runner.choose(decode(3)) is None
    assert runner.choose(decode(4)) == GraphKey(8)
    assert runner.choose(batch_of(prompt(0, 9))) is None
    four, eight = Candidate(True, 4), Candidate(True, 8)
    assert said == [four, four, four, eight, NO_GRAPH, NO_GRAPH]


def test_nonsense_buckets() -> None:
    with pytest.raises(ConfigError):
        runner_of(buckets=[0, 4])
    assert not runner_of(buckets=[]).enabled


# -- padding ------------------------------------------------------------------------------------------------------


def test_dummies_have_the_highest_ids() -> None:
    assert dummy_id(0) == 18446744073709551615
    assert dummy_id(3) == 18446744073709551612


@given(live=st.integers(1, 8), raises=st.booleans())
def test_a_padded_batch_is_restored_exactly(live: int, raises: bool) -> None:
    runner = runner_of()
    warm_up(runner)
    batch = decode(live)
    before = list(batch.generation)
    key = runner.choose(batch)
    assert key is not None

    def run() -> None:
        with runner.padded(batch.generation, key) as rows:
            assert len(rows) == key.batch_size
            assert rows[:live] == before
            assert {row.id for row in rows[live:]} <= {dummy_id(0)}
            if raises:
                raise InterruptedError

    if raises:
        with pytest.raises(InterruptedError):
            run()
    else:
        run()
    assert batch.generation == before


def test_a_dummy_is_held_once_by_every_manager_and_released_from_all() -> None:
    managers = [Seats(), Seats()]
    dummies = PaddingDummies(managers)
    for _ in range(3):
        assert dummies.get(0) is dummies.get(0)
    assert [manager.held for manager in managers] == [{dummy_id(0)}] * 2
    dummies.get(2)
    assert [len(manager.held) for manager in managers] == [2, 2]
    dummies.release()
    dummies.release()
    assert [manager.free_seats for manager in managers] == [4, 4]


def test_without_room_for_a_dummy_batches_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    full = [Seats(), Seats(free_seats=0)]
    dummies = PaddingDummies(full)
    runner = CUDAGraphRunner(Platform(), [1, 4], max_batch_size=4, dummies=dummies)
    warm_up(runner)
    with caplog.at_level(logging.WARNING):
        assert [runner.choose(decode(size)) for size in (3, 2, 3)] == [None, None, None]
    assert len(caplog.records) == 1
    assert full[0].free_seats == 4
    assert runner.choose(decode(4)) == GraphKey(4)
