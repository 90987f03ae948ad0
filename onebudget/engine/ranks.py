"""Several processes that serve one model together, each with its own card: what they tell each other.

``open_ranks()`` reads the environment that torchrun sets. A process on its own gets a ``RankGroup`` of one, whose
operations do nothing, so callers never ask.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.engine.rank_failure import RankFailure

T = TypeVar("T")

TIMEOUT_SECONDS = 30
"""How long ranks wait for each other inside a stage or a step before they give up."""


class RankGroup:
    """One process alone, and the contract of a group of them.

    Every operation is called by all ranks, in the same order. When a rank raises inside ``stage`` or ``guard``, all
    ranks raise before any of them leaves, and the group is closed: ``failure`` says why.
    """

    rank = 0
    size = 1
    local_rank = 0
    failure: RankFailure | None = None

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all: rank 0."""
        return self.rank == 0

    @property
    def shared(self) -> bool:
        return self.size > 1

    @property
    def speaks(self) -> bool:
        """Whether this process tells people about a failure: rank 0, and others where rank 0 can't."""
        return True

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order. Values are pickled; nothing of a device should be among them."""
        return [value]

    def minimum(self, number: int) -> int:
        return min(self.gather(number))

    def broadcast(self, value: T) -> T:
        """The value of rank 0."""
        return value

    def await_work(self, value: T) -> T:
        """Like ``broadcast``, but without a limit on the wait: between two calls people may think."""
        return value

    def meet(self) -> None:
        """Wait until all ranks are here, for up to ten minutes: one may read weights much faster than another."""

    def lead(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which runs on rank 0 alone. Its failure is everybody's."""
        return work()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """All ranks do this part and wait for each other at its end."""
        yield

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Like ``stage``, without the wait at the end: for parts in which the ranks exchange data anyway."""
        yield

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """While this rank, which failed, still works out what to say about it, so that others wait for that."""
        yield

    def begin_step(self, digest: Callable[[], int]) -> None:
        """Before each step: all ranks must stand at the same point, told by ``digest``.

        ``AgreementError`` otherwise; ``KeyboardInterrupt`` on all of them when any was interrupted.
        """

    @contextmanager
    def hold_interrupts(self) -> Iterator[None]:
        """Keep Ctrl-C until the next ``begin_step``, where all ranks stop together."""
        yield

    def when_parted(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the group ends: what was built on its connections is void then."""

    def close(self) -> None:
        """Part without a failure. Safe to call again."""


_current: RankGroup | None = None


def open_ranks(device: str = "host", environ: Mapping[str, str] | None = None) -> RankGroup:
    """The group this process belongs to, by torchrun's environment; made by the first call, then always the same.

    ``device`` is where the model runs. Raises ``ConfigError`` for an unusable environment, ``AgreementError`` when the
    other ranks can't be reached.
    """
    global _current
    if _current is None:
        place = read_environment(os.environ if environ is None else environ)
        if place is None:
            return RankGroup()
        from onebudget.engine.process_ranks import ProcessRanks

        _current = ProcessRanks(*place, device=device, timeout_seconds=TIMEOUT_SECONDS)
        atexit.register(close_ranks, wait=False)
    return _current


def close_ranks(*, wait: bool = True) -> None:
    """Leave the group of this process; with ``wait`` once all ranks are here."""
    global _current
    group, _current = _current, None
    if group is not None:
        from onebudget.engine.process_ranks import ProcessRanks

        assert isinstance(group, ProcessRanks)
        group.close(wait=wait)


def read_environment(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """(rank, size, rank on this host) as torchrun sets them; None for a process alone."""
    size = _number(environ, "WORLD_SIZE", 1)
    if size == 1:
        return None
    rank = _number(environ, "RANK", None)
    if rank >= size:
        raise ConfigError.for_field("RANK", rank, f"below WORLD_SIZE ({size})")
    return rank, size, _number(environ, "LOCAL_RANK", rank)


def _number(environ: Mapping[str, str], name: str, default: Any) -> int:
    text = environ.get(name, "")
    if text == "" and default is not None:
        return int(default)
    if not text.isdigit() or (name == "WORLD_SIZE" and int(text) == 0):
        raise ConfigError.for_field(name, text or None, "a number, as torchrun sets it for each process")
    return int(text)
