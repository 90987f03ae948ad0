from __future__ import annotations

import logging

import pytest

from onebudget.buffers.virtual.chunk import Chunk, ChunkStatus
from onebudget.errors import StateError

INVALID, RELEASED, MATERIALIZED, ERRORED = ChunkStatus


class Steps:
    """A creator and configurators that write down what happens and fail where they are told to."""

    def __init__(self, count: int, *failing: str) -> None:
        self.log: list[str] = []
        self.failing = set(failing)
        self.chunk = Chunk(Part(self, "memory"), [Part(self, f"step{number}") for number in range(count)])

    def act(self, what: str) -> None:
        if what in self.failing:
            raise OSError(what)
        self.log.append(what)


class Part:
    def __init__(self, steps: Steps, name: str) -> None:
        self.steps, self.name = steps, name

    def create(self) -> int:
        self.steps.act(f"create {self.name}")
        return 7

    def release(self, handle: int) -> None:
        assert handle == 7
        self.steps.act(f"release {self.name}")

    def setup(self, handle: int) -> None:
        assert handle == 7
        self.steps.act(f"setup {self.name}")

    def teardown(self, handle: int, *, destructing: bool) -> None:
        self.steps.act(f"teardown {self.name}")
        if destructing:
            self.steps.log[-1] += " for good"

    def drop(self) -> None:
        self.steps.act(f"drop {self.name}")


def test_up_and_down_in_opposite_orders() -> None:
    steps = Steps(2)
    chunk = steps.chunk
    assert chunk.status is RELEASED
    chunk.materialize()
    assert (chunk.status, chunk.handle) == (MATERIALIZED, 7)
    chunk.release()
    assert (chunk.status, chunk.handle) == (RELEASED, 0)
    assert steps.log == [
        "create memory", "setup step0", "setup step1", "teardown step1", "teardown step0", "release memory",
    ]  # fmt: skip


def test_a_chunk_without_creator_is_invalid() -> None:
    chunk = Chunk()
    assert chunk.status is INVALID
    for refused in (chunk.materialize, chunk.release):
        with pytest.raises(StateError, match="invalid"):
            refused()
    chunk.destroy()


def test_wrong_order_is_refused() -> None:
    chunk = Steps(1).chunk
    with pytest.raises(StateError, match="released chunk"):
        chunk.release()
    chunk.materialize()
    with pytest.raises(StateError, match="materialized chunk"):
        chunk.materialize()


def test_a_failed_create_leaves_it_released() -> None:
    steps = Steps(1, "create memory")
    with pytest.raises(OSError, match="create"):
        steps.chunk.materialize()
    assert steps.chunk.status is RELEASED


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_setup_is_undone_as_far_as_it_went(failing: int) -> None:
    steps = Steps(3, f"setup step{failing}")
    with pytest.raises(OSError, match="setup"):
        steps.chunk.materialize()
    assert steps.chunk.status is ERRORED
    with pytest.raises(StateError):
        steps.chunk.materialize()
    steps.log.clear()
    steps.chunk.release()
    assert steps.chunk.status is RELEASED
    assert steps.log == [*(f"teardown step{n}" for n in reversed(range(failing))), "release memory"]
    steps.failing.clear()
    steps.chunk.materialize()
    assert steps.chunk.status is MATERIALIZED


def test_release_never_stops_early_and_keeps_the_last_error(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(3, "teardown step2", "teardown step0")
    steps.chunk.materialize()
    steps.log.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="step0"):
        steps.chunk.release()
    assert steps.log == ["teardown step1", "release memory"]
    assert "step2" in caplog.text
    assert steps.chunk.status is INVALID
    with pytest.raises(StateError):
        steps.chunk.materialize()


def test_a_failed_release_of_the_memory_is_final() -> None:
    steps = Steps(0, "release memory")
    steps.chunk.materialize()
    with pytest.raises(OSError, match="release memory"):
        steps.chunk.release()
    assert steps.chunk.status is INVALID


def test_destroy_tears_down_for_good_and_drops_what_steps_keep() -> None:
    steps = Steps(1)
    steps.chunk.materialize()
    steps.chunk.destroy()
    assert steps.log[2:] == ["teardown step0 for good", "release memory", "drop step0"]
    assert steps.chunk.status is INVALID
    asleep = Steps(1)
    asleep.chunk.destroy()
    assert asleep.log == ["drop step0"]


def test_destroy_drops_even_when_releasing_fails() -> None:
    steps = Steps(1, "teardown step0")
    steps.chunk.materialize()
    with pytest.raises(OSError, match="teardown"):
        steps.chunk.destroy()
    assert steps.log[-2:] == ["release memory", "drop step0"]
