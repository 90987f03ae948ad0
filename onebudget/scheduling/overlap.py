"""The overlap loop: a step is scheduled and launched while the tokens of the one before are on their way to the host.

What that changes: the managers prepare step N+1 before they settle step N; a request that ends in N by a token nobody
could foresee is computed once more in N+1, and that token is dropped; its seat comes back after N+1 was launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onebudget.core import RequestState

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.scheduling.moments import Moments


@dataclass(slots=True)
class Launched:
    """A step that was launched and whose tokens are not read. ``paused`` settle when they are."""

    batch: ScheduledBatch
    sampled: object
    paused: list[Request] = field(default_factory=list)


class OverlapLoop:
    """Schedule N+1, prepare it, launch its forward from the tokens of N on the device; then read N, sample N+1, and
    settle N."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self.previous: Launched | None = None

    def step(self) -> list[Request]:
        """One step; returns the requests that ended in it."""
        moments = self._moments
        batch = moments.schedule(in_flight=self.previous is not None)
        if not moments.can_queue(batch) and batch.size:
            # Another rank has nothing to launch: what this one would read now comes out of order.
            self._settle(batch.paused)
            return moments.end_step([])
        output, failure = self._launch(batch)
        ended, lost = self._read_previous()
        moments.settle(batch.paused)
        launched, failure = self._sample(batch, output, failure or lost)
        del output  # an error keeps this frame, and with it whatever its names hold
        if launched is not None:
            moments.launched(batch)
        ended += self._process_previous()
        if failure is not None:
            ended += moments.fail(batch, failure)
        self.previous = launched
        self._foresee()
        if launched is not None and not moments.scheduler.has_work:
            ended += self.drain()
        return moments.end_step(ended)

    def _launch(self, batch: ScheduledBatch) -> tuple[object, Exception | None]:
        if not batch.size:
            return None, None
        try:
            self._moments.prepare(batch)
            before = self.previous.sampled if self.previous is not None else None
            return self._moments.model.forward(batch, before), None
        except Exception as error:
            return None, error

    def _sample(
        self, batch: ScheduledBatch, output: object, failure: Exception | None
    ) -> tuple[Launched | None, Exception | None]:
        if not batch.size or failure is not None:
            return None, failure if batch.size else None
        try:
            return Launched(batch, self._moments.model.sample(batch, output)), None
        except Exception as error:
            return None, error

    def _settle(self, paused: list[Request]) -> None:
        """Now, or for those whose token may be on its way, when it was read."""
        if self.previous is None:
            self._moments.settle(paused)
        else:
            self.previous.paused += paused

    def _read_previous(self) -> tuple[list[Request], Exception | None]:
        """Take the tokens of the step before. Where they can't be read: the requests this ended, and why."""
        previous, moments = self.previous, self._moments
        if previous is None:
            return [], None
        try:
            tokens = moments.model.read(previous.batch, previous.sampled)
        except Exception as error:
            self.previous = None
            return moments.fail(previous.batch, error), error
        moments.take(previous.batch, tokens)
        moments.settle(previous.paused)
        return [], None

    def _process_previous(self) -> list[Request]:
        """Let go of those who ended in the step before, then settle it."""
        return [] if self.previous is None else self._moments.process(self.previous.batch)

    def _foresee(self) -> None:
        """Requests whose last token is on its way need no further step."""
        if self.previous is None:
            return
        for request in self.previous.batch.sampled:
            if request.state is RequestState.GENERATION and request.produced_tokens >= request.max_new_tokens:
                request.state = RequestState.TO_COMPLETE

    def in_flight(self, request: Request) -> bool:
        """Whether a step that was launched still needs this request."""
        return self.previous is not None and request in self.previous.batch.requests

    def drain(self) -> list[Request]:
        """Process what was launched; returns the requests that ended with it."""
        ended, _ = self._read_previous()
        ended += self._process_previous()
        self.previous = None
        return ended

    def forget(self) -> None:
        """Drop what was launched, without touching the device."""
        self.previous = None
