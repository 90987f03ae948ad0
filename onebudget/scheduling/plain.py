"""The plain loop: a step is through before the next one is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.scheduling.moments import Moments


class PlainLoop:
    """Schedule, prepare, forward, sample, append, free, update."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def step(self) -> list[Request]:
        """One step; returns the requests that ended in it."""
        moments = self._moments
        batch = moments.schedule()
        moments.settle(batch.paused)
        ended: list[Request] = []
        if moments.can_queue(batch):
            try:
                tokens = self._compute(batch)
            except Exception as error:
                ended = moments.fail(batch, error)
            else:
                moments.launched(batch)
                moments.take(batch, tokens)
                ended = moments.process(batch)
        return moments.end_step(ended)

    def _compute(self, batch: ScheduledBatch) -> Sequence[int]:
        # In a function of its own: an error must not keep the output alive in the frame that handles it.
        model = self._moments.model
        self._moments.prepare(batch)
        sampled = model.sample(batch, model.forward(batch, None))
        return model.read(batch, sampled)

    def in_flight(self, request: Request) -> bool:
        """Whether a step that was launched still needs this request."""
        return False

    def drain(self) -> list[Request]:
        """Process what was launched; returns the requests that ended with it."""
        return []

    def forget(self) -> None:
        """Drop what was launched, without touching the device."""
