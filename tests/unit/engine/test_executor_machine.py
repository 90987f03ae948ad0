"""Requests come, fail, are cancelled and paused in any order: each ends once, the others never notice, nothing leaks.

Blocks remember the text that was written to them, so a token computed from somebody else's cache is seen.
"""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams, ScheduledBatch
from onebudget.device.sample import MemorySample
from onebudget.devtools.kv_lives import MovingTier, WrittenStore, check_books
from onebudget.devtools.scripted import ScriptedRunner, scripted_executor
from onebudget.engine.executor import Executor
from onebudget.engine.failures import Relief
from onebudget.errors import AllocationError, CapacityError
from onebudget.resources.kv.choice import kv_manager
from onebudget.resources.kv.counters import KVCounters
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.rebalance import MIN_SAMPLES

END = 2
SIZE = 4
BLOCKS = 12
WINDOW = 7
MOST_PROMPT, MOST_NEW = 36, 12
"""Together less than the pools hold, so that nobody fails for being too long."""
ERRORS = {
    "error": lambda: RuntimeError("injected"),
    "out of memory": lambda: AllocationError(512, 0, owner="activations", detail="injected"),
    "host out of memory": lambda: MemoryError("injected"),
}


def spoken(prompt: list[int], answer: list[int]) -> int:
    """Depends on everything before; now and then the end."""
    token = random.Random(repr((prompt, answer))).randrange(80)
    return token + 3 if token else END


class Text:
    """What a request says, as far as anybody asked; behind an end token too, which may be computed before it is
    read."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.answer: list[int] = []

    def up_to(self, position: int) -> tuple[int, ...]:
        while len(self.prompt) + len(self.answer) <= position:
            self.answer.append(spoken(self.prompt, self.answer))
        return (*self.prompt, *self.answer)[: position + 1]


class Unreadable:
    """Sampled tokens that never reach the host."""

    def read(self) -> list[int]:
        raise RuntimeError("injected")


class WritingRunner(ScriptedRunner):
    """Writes what each slot's K/V would depend on, and reads all that attention would.

    ``hit`` are the requests that injected failures may end.
    """

    def __init__(self, machine: ExecutorMachine) -> None:
        super().__init__(lambda one: spoken(one.prompt_token_ids, one.output_token_ids))
        self.machine = machine
        self.unreadable = 0
        self.hit: set[int] = set()
        self.mixed_up: list[tuple[int, int]] = []
        self._unread: set[int] = set()

    def forward(self, batch: ScheduledBatch) -> None:
        members = {one.id for one in batch.requests}
        if self._unread:
            self.hit |= members | self._unread
            self._unread = set()
        if self.faults and not (self.relief is not None and not self.kv_written):
            self.hit |= members
        super().forward(batch)
        for group in self.machine.engine.kv.groups:
            for one in batch.requests:
                self._compute(group, one)
        for one in batch.sampled:
            if one.computed_tokens + one.step_tokens != one.prompt_tokens + one.produced_tokens:
                self.mixed_up.append((one.id, one.computed_tokens))  # the next token would follow another than the last

    def _compute(self, group: KVGroup, one: Request) -> None:
        table, store = group.block_table(one), cast("WrittenStore", group.store)
        text, end = self.machine.texts[one.id], one.computed_tokens + one.step_tokens
        for position in range(one.computed_tokens, end):
            store.blocks[table[position // SIZE]][position % SIZE] = text.up_to(position)
        first = 0 if group.window_tokens is None else max(0, one.computed_tokens - group.window_tokens + 1)
        for position in range(first, end):
            if store.blocks[table[position // SIZE]][position % SIZE] != text.up_to(position):
                self.mixed_up.append((one.id, position))

    def sample(self, batch: ScheduledBatch, output: object, sampler: Any) -> Any:
        members = {one.id for one in batch.requests}
        if self.sampling_faults:
            self.hit |= members
        tokens = super().sample(batch, output, sampler)
        if not self.unreadable:
            return tokens
        self.unreadable -= 1
        self.hit |= members
        self._unread = members
        return Unreadable()


def build_cache(config: BudgetConfig, near: int, *, windows: bool) -> KVCacheManager:
    counters = KVCounters()
    groups = []
    for layer, (blocks, window, slack) in enumerate(((BLOCKS, None, 0), (BLOCKS + 8, WINDOW, 10))[: 1 + windows]):
        store = WrittenStore(blocks, SIZE)
        tier = MovingTier("host", near, store) if near else None
        groups.append(
            KVGroup(store, layers=[layer], window_tokens=window, step_slack_blocks=slack, near=tier, counters=counters)
        )
    return kv_manager(groups, config, counters=counters)


class ExecutorMachine(RuleBasedStateMachine):
    """Starts with ``set_up``."""

    def __init__(self) -> None:
        super().__init__()
        self.members: list[Request] = []
        self.ended: list[Request] = []
        self.cancelled: set[int] = set()
        self.texts: dict[int, Text] = {}

    @initialize(
        overlap=st.booleans(),
        manager=st.sampled_from(["v1", "v2"]),
        policy=st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"]),
        windows=st.booleans(),
        near=st.sampled_from([0, 5, 30]),
        tokens=st.integers(4, 32),
        seats=st.integers(1, 4),
        reuse=st.booleans(),
    )
    def set_up(
        self, overlap: bool, manager: str, policy: str, windows: bool, near: int, tokens: int, seats: int, reuse: bool
    ) -> None:
        choice = {"scheduler_policy": policy} if manager == "v1" else {"kv_pool_rebalance": True}
        self.config = BudgetConfig(
            max_seq_len=256, max_num_tokens=tokens, max_batch_size=seats, tokens_per_block=SIZE, overlap=overlap,
            kv_cache_manager=manager, enable_block_reuse=reuse, **choice,
        )  # fmt: skip
        self.runner = WritingRunner(self)
        cache = build_cache(self.config, near, windows=windows)
        self.quota = cache.allocated_bytes
        self.engine = Executor(self.config, cast("Any", self.runner), cache)

    # -- what happens -----------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        return hasattr(self, "engine") and self.engine.stopped is None

    @precondition(lambda self: self.serves)
    @rule(
        load=st.lists(
            st.tuples(st.integers(1, MOST_PROMPT), st.sampled_from([1, 4, MOST_NEW, MOST_NEW]), st.integers(0, 3)),
            min_size=1,
            max_size=5,
        ),
        steps=st.integers(0, 6),
    )
    def submit(self, load: list[tuple[int, int, int]], steps: int) -> None:
        for prompt, new, family in load:
            number, shared = len(self.members), min(prompt, 4 * family)
            one = Request(
                number, [9] * shared + [number % 5 + 4] * (prompt - shared), SamplingParams(), max_new_tokens=new,
                end_token_ids=frozenset([END]),
            )  # fmt: skip
            self.members.append(one)
            self.texts[number] = Text(one.prompt_token_ids)
            self.engine.submit(one)
        self.step(steps)

    @rule(steps=st.integers(1, 20))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.ended += self.engine.step()

    @precondition(lambda self: self.members)
    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        one = self.members[index % len(self.members)]
        if not one.finished:
            self.cancelled.add(one.id)
        self.engine.cancel(one)

    @rule()
    def drain(self) -> None:
        self.engine.drain()

    @precondition(lambda self: self.engine.has_work)
    @rule(
        kind=st.sampled_from(sorted(ERRORS)),
        place=st.sampled_from(["forward", "sample", "read"]),
        later=st.integers(0, 9),
    )
    def break_a_step(self, kind: str, place: str, later: int) -> None:
        self.step(later)
        if place == "read":
            self.runner.unreadable = 1
        else:
            faults = self.runner.faults if place == "forward" else self.runner.sampling_faults
            faults[:] = [ERRORS[kind]()]
        self.step(1)

    @precondition(lambda self: self.engine.has_work)
    @rule(later=st.integers(0, 9))
    def run_out_of_memory_with_relief(self, later: int) -> None:
        """Caches give back what was asked for, so the same step runs again and nobody notices."""
        self.step(later)
        self.runner.relief, self.runner.kv_written = Relief(MemorySample(9, 0, 9, 9), {}, 512), False
        self.runner.faults[:] = [AllocationError(512, 0, owner="activations")]
        retried = self.engine.counters.retried_steps
        self.step(1)
        self.runner.relief, self.runner.kv_written = None, True
        assert self.engine.counters.retried_steps == retried + (not self.runner.faults)
        self.runner.faults.clear()

    @precondition(lambda self: self.engine.has_work)
    @rule(
        manager=st.sampled_from(["kv", "slots"]),
        index=st.integers(0, 10),
        after=st.booleans(),
        stranger=st.booleans(),
        later=st.integers(0, 9),
    )
    def lack_room(self, manager: str, index: int, after: bool, stranger: bool, later: int) -> None:
        """A manager refuses one request of the batch, before or after it served the others; or nobody it names."""
        self.step(later)
        target = getattr(self.engine, manager)
        original = target.prepare

        def prepare(batch: ScheduledBatch) -> None:
            if after:
                original(batch)
            named = batch.requests[index % batch.size]
            self.runner.hit |= {one.id for one in batch.requests} if stranger else {named.id}
            raise CapacityError("injected", request_id=10**6 if stranger else named.id)

        target.prepare = prepare
        self.step(1)
        del target.prepare

    @precondition(lambda self: not self.engine.has_work)
    @rule()
    def lose_the_cache_while_nobody_asks(self) -> None:
        """As sleep and wake do."""
        self.engine.kv.reset_reuse()
        for group in self.engine.kv.groups:
            store = cast("WrittenStore", group.store)
            store.blocks = [[None] * SIZE for _ in store.blocks]

    @precondition(lambda self: self.engine.rebalancer is not None)
    @rule(full=st.integers(0, 9), windowed=st.integers(1, 9))
    def use_pools_unevenly(self, full: int, windowed: int) -> None:
        balance = self.engine.rebalancer
        assert balance is not None
        balance._use.samples, balance._use.held_bytes = MIN_SAMPLES, [full * 10**6, windowed * 10**6]
        balance._last_s = None

    # -- what holds at any time -------------------------------------------------------------------------------

    @invariant()
    def everybody_reads_what_was_written_for_them(self) -> None:
        if hasattr(self, "runner"):
            assert not self.runner.mixed_up

    @invariant()
    def nobody_ends_twice_or_waits_after_the_end(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert len({one.id for one in self.ended}) == len(self.ended)
        assert all(one.finished for one in self.ended)
        running, waiting = self.engine.scheduler.running, self.engine.scheduler.waiting
        assert not set(map(id, running)) & set(map(id, waiting))
        assert not any(one.finished for one in waiting)
        for one in self.members:
            if one.released:
                assert one not in running and one not in waiting
                assert all(one.id not in group.sequences for group in self.engine.kv.groups)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if not hasattr(self, "engine"):
            return
        kv = self.engine.kv
        for group in kv.groups:
            check_books(group.blocks, [group.kept_blocks(one) for one in group.sequences.values()])
        assert self.quota - 8 < kv.allocated_bytes <= self.quota

    @invariant()
    def only_those_that_a_failure_met_fail(self) -> None:
        if hasattr(self, "engine") and self.engine.stopped is None:
            failed = {one.id for one in self.members if one.finish_reason == "error"}
            assert failed <= self.runner.hit

    # -- the end ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.runner.faults.clear()
        self.runner.sampling_faults.clear()
        self.runner.unreadable = 0
        steps = 0
        while self.engine.has_work:
            self.ended += self.engine.step()
            steps += 1
            assert steps < 2000, "the loop does not end"
        self.ended += self.engine.step()
        self.only_those_that_a_failure_met_fail()
        self.everybody_reads_what_was_written_for_them()
        self._all_ended_once()
        self._nothing_is_held()
        self._answers_are_those_without_failures()

    def _all_ended_once(self) -> None:
        assert len({one.id for one in self.ended}) == len(self.ended)
        assert {one.id for one in self.ended} | self.cancelled == {one.id for one in self.members}
        for one in self.members:
            assert (one.finish_reason == "cancelled") == (one.id in self.cancelled)
            assert one.finish_reason in ("stop", "length", "error", "cancelled")
            assert one.finish_reason != "error" or one.error

    def _nothing_is_held(self) -> None:
        engine = self.engine
        engine.kv.reset_reuse()
        assert engine.slots.free_slots == engine.slots.max_resource_count()
        for group in engine.kv.groups:
            assert group.free_blocks == group.num_blocks
            assert group.blocks.spill is None or group.blocks.spill.near.used_slots == 0

    def _answers_are_those_without_failures(self) -> None:
        calm = scripted_executor(
            self.config.replace(kv_cache_manager="v1", kv_pool_rebalance=False, overlap=False, max_batch_size=4),
            1000,
            lambda one: spoken(one.prompt_token_ids, one.output_token_ids),
        )
        for one in self.members:
            again = Request(
                one.id, one.prompt_token_ids, SamplingParams(), max_new_tokens=one.max_new_tokens,
                end_token_ids=frozenset([END]),
            )  # fmt: skip
            calm.submit(again)
            while calm.has_work:
                calm.step()
            if one.finish_reason in ("stop", "length"):
                assert (one.finish_reason, one.output_token_ids) == (again.finish_reason, again.output_token_ids)
            else:
                assert one.output_token_ids == again.output_token_ids[: len(one.output_token_ids)]


TestExecutorMachine = ExecutorMachine.TestCase
TestExecutorMachine.settings = settings(max_examples=100, stateful_step_count=50)


@pytest.mark.long
class TestExecutorMachineLong(ExecutorMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=1500, stateful_step_count=80, derandomize=False)
