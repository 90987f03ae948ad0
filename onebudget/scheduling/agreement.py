"""What ranks with requests of their own agree on in every step, because their forwards share collectives.

Each rank schedules its own requests. Expert layers exchange tokens between all ranks, so a forward takes place on all
of them or on none: a rank with nothing to do joins with a dummy, and a vote says whether everybody has a batch. Every
exchange happens in every step, whatever a rank has, or the order of collectives would differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onebudget.errors import AgreementError

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch

Gather = Callable[[str, Any], Sequence[Any]]
"""Collects one value from every rank; the name says which exchange of the step it is."""


class Agreement(Protocol):
    """``padded_steps``: dummies that filled an empty batch so far; ``postponed_steps``: batches that did not run."""

    padded_steps: int
    postponed_steps: int

    @property
    def padding(self) -> list[Request]:
        """Dummies of the step in hand."""
        ...

    def begin_step(self, has_work: bool) -> None: ...

    def pad(self, batch: ScheduledBatch) -> None:
        """Put a dummy into an empty batch while other ranks have work."""
        ...

    def can_queue(self, size: int) -> bool: ...

    def stand_in(self, batch: ScheduledBatch) -> None:
        """Put dummies into an empty batch that takes the place of one that failed after the vote.

        ``AgreementError`` where there is no room for one: the others wait for this rank then.
        """
        ...

    def end_padding(self) -> None:
        """The dummies are gone."""
        ...

    def end_step(self, failed: Iterable[int]) -> set[int]:
        """Ids of requests that failed in this step on any rank."""
        ...


class Alone:
    """One rank, or several that serve the same requests."""

    def __init__(self) -> None:
        self.padding: list[Request] = []
        self.padded_steps = self.postponed_steps = 0

    def begin_step(self, has_work: bool) -> None:
        pass

    def pad(self, batch: ScheduledBatch) -> None:
        pass

    def can_queue(self, size: int) -> bool:
        return size > 0

    def stand_in(self, batch: ScheduledBatch) -> None:
        pass

    def end_padding(self) -> None:
        pass

    def end_step(self, failed: Iterable[int]) -> set[int]:
        return set(failed)


class AttentionDataParallel:
    """Agreement between ranks that have requests of their own.

    ``make_dummies(ids)`` gives requests that hold one block and one slot, or None with nothing taken. Dummies have
    negative ids and are gone at the end of their step.
    """

    def __init__(self, gather: Gather, make_dummies: Callable[[list[int]], list[Request] | None]) -> None:
        self._gather = gather
        self._make_dummies = make_dummies
        self._somebody_works = False
        self.padding: list[Request] = []
        self.padded_steps = 0
        self.postponed_steps = 0

    def begin_step(self, has_work: bool) -> None:
        self._somebody_works = any(self._gather("work", int(has_work)))

    def pad(self, batch: ScheduledBatch) -> None:
        if batch.size or not self._somebody_works:
            return
        self._fill(batch)
        self.padded_steps += len(self.padding)

    def stand_in(self, batch: ScheduledBatch) -> None:
        self._fill(batch)
        if not self.padding:
            raise AgreementError("a batch failed and no KV block is free for the dummy in its place: all ranks end.")

    def _fill(self, batch: ScheduledBatch) -> None:
        self.padding = self._make_dummies([DUMMY_ID]) or []
        batch.generation += self.padding

    def can_queue(self, size: int) -> bool:
        agreed = all(self._gather("queue", size))
        self.postponed_steps += size > 0 and not agreed
        return agreed

    def end_padding(self) -> None:
        self.padding = []

    def end_step(self, failed: Iterable[int]) -> set[int]:
        return set().union(*self._gather("end", tuple(failed)))


DUMMY_ID = -1_000_001
"""Id of the dummy that keeps an idle rank in step; profile and graph dummies count down from -1."""
