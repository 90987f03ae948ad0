"""One virtual allocation: physical memory that can be taken away and set up again, step by step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from onebudget.errors import StateError

log = logging.getLogger(__name__)


class ChunkStatus(Enum):
    INVALID = "invalid"
    """Can't be used again: it never had a creator, or giving it back failed."""
    RELEASED = "released"
    MATERIALIZED = "materialized"
    ERRORED = "errored"
    """Half set up; ``release`` is the only way on."""


class Creator(Protocol):
    """Makes and gives back physical memory."""

    def create(self) -> int:
        """A non-zero handle. When it raises, nothing was made."""

    def release(self, handle: int) -> None: ...


class Configurator(Protocol):
    """One step of making physical memory usable. When ``setup`` raises it leaves nothing behind."""

    def setup(self, handle: int) -> None: ...

    def teardown(self, handle: int, *, destructing: bool) -> None:
        """Undo ``setup``; ``destructing`` means that the contents are not needed again."""

    def drop(self) -> None:
        """The chunk is gone for good: give back what the step keeps between two lives."""


class Chunk:
    """``status`` follows from ``state`` (steps that are set up) and ``handle`` (0: no physical memory)."""

    __slots__ = ("_configurators", "_creator", "_handle", "_state")

    def __init__(self, creator: Creator | None = None, configurators: Sequence[Configurator] = ()) -> None:
        self._creator = creator
        self._configurators = tuple(configurators)
        self._state = 0
        self._handle = 0

    def __repr__(self) -> str:
        return f"Chunk({self.status.value}, {self._state} of {len(self._configurators)} steps, handle {self._handle})"

    @property
    def handle(self) -> int:
        return self._handle

    @property
    def status(self) -> ChunkStatus:
        if self._creator is None:
            return ChunkStatus.INVALID
        if self._state == 0 and self._handle == 0:
            return ChunkStatus.RELEASED
        if self._state == len(self._configurators) and self._handle:
            return ChunkStatus.MATERIALIZED
        return ChunkStatus.ERRORED

    def materialize(self) -> None:
        """Create and set up. When a step raises the chunk is ``ERRORED`` (or still released, when creating failed)."""
        self._require(ChunkStatus.RELEASED)
        assert self._creator is not None
        self._handle = self._creator.create()
        for configurator in self._configurators:
            configurator.setup(self._handle)
            self._state += 1

    def release(self, *, destructing: bool = False) -> None:
        """Undo the steps that were set up, in reverse, then give the handle back.

        Every step is tried. The last error is raised at the end, earlier ones are logged, and the chunk is then
        ``INVALID`` for good.
        """
        self._require(ChunkStatus.MATERIALIZED, ChunkStatus.ERRORED)
        error: Exception | None = None
        while self._state:
            self._state -= 1
            try:
                self._configurators[self._state].teardown(self._handle, destructing=destructing)
            except Exception as raised:
                error = _keep_last(error, raised)
        handle, self._handle = self._handle, 0
        try:
            assert self._creator is not None
            self._creator.release(handle)
        except Exception as raised:
            error = _keep_last(error, raised)
        if error is not None:
            self._creator = None
            raise error

    def destroy(self) -> None:
        """Give everything back, contents included, from whatever state. The chunk is ``INVALID`` afterwards."""
        try:
            if self.status in (ChunkStatus.MATERIALIZED, ChunkStatus.ERRORED):
                self.release(destructing=True)
        finally:
            self._creator = None
            for configurator in self._configurators:
                configurator.drop()

    def _require(self, *allowed: ChunkStatus) -> None:
        if self.status not in allowed:
            names = " or ".join(status.value for status in allowed)
            raise StateError(f"a {self.status.value} chunk can't do this: it must be {names}")


def _keep_last(earlier: Exception | None, last: Exception) -> Exception:
    if earlier is not None:
        log.error("releasing virtual memory went on after this error", exc_info=earlier)
    return last
