"""The moments of a step, one function each. Which follows which is said by ``plain`` and ``overlap``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from onebudget.core import Request, RequestState, ScheduledBatch
from onebudget.resources.base import ResourceKind
from onebudget.scheduling.agreement import Alone
from onebudget.scheduling.deadlock import DeadlockDetector

if TYPE_CHECKING:
    from onebudget.resources import ResourceManager
    from onebudget.scheduling.agreement import Agreement
    from onebudget.scheduling.cache import SchedulableCache
    from onebudget.scheduling.scheduler import Scheduler


class StepModel(Protocol):
    """What computes a step. ``sampled`` of one step may still be on the device when the next one starts from it."""

    def forward(self, batch: ScheduledBatch, sampled_before: object | None) -> object:
        """Launch the batch. ``sampled_before`` are the tokens of the step before, for requests that have a
        ``pending_row`` in them."""
        ...

    def sample(self, batch: ScheduledBatch, output: object) -> object:
        """One token for each of ``batch.sampled`` from what ``forward`` gave."""
        ...

    def read(self, batch: ScheduledBatch, sampled: object) -> Sequence[int]:
        """Wait for the tokens, in the order of ``batch.sampled``."""
        ...


Failed = Callable[[ScheduledBatch, Exception], list[Request]]


def _raise(batch: ScheduledBatch, error: Exception) -> list[Request]:
    raise error


class Moments:
    """Scheduler, managers and model of one loop, and what happens to requests at each moment.

    ``on_token`` is called after each token and may finish the request; what it raises ends the request. ``on_batch``
    sees every batch that was computed. ``on_failure`` is told of a step that failed and returns the requests it ended
    (and released); without it the error goes through. ``on_release`` and ``on_pause`` are for whoever keeps something
    per request beside the managers. ``clock`` gives the seconds of first and last tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        resources: ResourceManager,
        kv: SchedulableCache,
        model: StepModel,
        *,
        agreement: Agreement | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_batch: Callable[[ScheduledBatch], None] | None = None,
        on_failure: Failed = _raise,
        on_release: Callable[[Request], None] | None = None,
        on_pause: Callable[[Request], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.resources = resources
        self.model = model
        self.agreement = agreement or Alone()
        self.clock = clock
        self.on_token: Callable[[Request], None] | None = None
        self._on_failure = on_failure
        self._kv = kv
        self._on_batch = on_batch
        self._on_release = on_release
        self._on_pause = on_pause
        self._interrupt: BaseException | None = None
        self._deadlock = DeadlockDetector(scheduler, kv)
        self.scheduled = 0

    # -- before the forward -----------------------------------------------------------------------------------

    def schedule(self, *, in_flight: bool = False) -> ScheduledBatch:
        """Choose the batch, and let those who gave their place up go from the managers.

        ``StateError`` when nothing has moved for many steps; ``in_flight`` says that a launched step still may.
        """
        self.agreement.begin_step(self.scheduler.has_more_to_compute)
        batch = self.scheduler.schedule()
        self.scheduled = batch.size
        self._deadlock.watch(batch.size, in_flight=in_flight or bool(batch.paused))
        for request in batch.paused:
            self._vacate(request)
        self.agreement.pad(batch)
        return batch

    def _vacate(self, request: Request) -> None:
        """Seats and everything else of a paused request; its KV was given back or moved when it was paused."""
        kv: object = self._kv
        for manager in reversed(list(self.resources)):
            if manager is not kv:
                manager.free(request)
        if self._on_pause is not None:
            self._on_pause(request)

    def give_way(self, request: Request) -> bool:
        """Let a request that found no blocks wait instead of failing it, where the scheduler's policy pauses. Its
        tokens are all known."""
        if not self.scheduler.give_way(request):
            return False
        self._vacate(request)
        self.scheduler.settle_paused(request)
        return True

    def can_queue(self, batch: ScheduledBatch) -> bool:
        """Whether every rank has something to compute."""
        if self.agreement.can_queue(batch.size):
            return True
        self._drop_padding(batch)
        return False

    def prepare(self, batch: ScheduledBatch) -> None:
        """Hold what the cache has of new requests, then the managers' hooks with the token fit behind them."""
        try:
            self.scheduler.begin(batch)
            self.resources.prepare(batch)
        except Exception:
            self._join_with_dummies(batch)
            raise

    def _join_with_dummies(self, batch: ScheduledBatch) -> None:
        """Ranks that agreed to compute wait for each other inside the forward, so one whose batch failed takes part
        with dummies."""
        self._drop_padding(batch)
        stand_in = ScheduledBatch()
        self.agreement.stand_in(stand_in)
        if stand_in.size:
            try:
                self.resources.get(ResourceKind.KV).prepare(stand_in)  # type: ignore[union-attr]
                self.model.forward(stand_in, None)
            finally:
                self._drop_padding(stand_in)

    def fail(self, batch: ScheduledBatch, error: Exception) -> list[Request]:
        """A step failed; returns the requests that ended with it."""
        self._drop_padding(batch)
        return self._on_failure(batch, error)

    # -- behind it --------------------------------------------------------------------------------------------

    def launched(self, batch: ScheduledBatch) -> None:
        """What the host knows without the tokens: positions, states, and that tokens are on their way."""
        for request in batch.context_chunking:
            request.computed_tokens += request.chunk_tokens
        for request in batch.context_last:
            request.computed_tokens += request.chunk_tokens
        for request in batch.generation:
            request.computed_tokens += 1 + len(request.draft_tokens)
        for row, request in enumerate(batch.sampled):
            if request.state <= RequestState.GENERATION:
                request.state = RequestState.GENERATION
                request.pending_tokens = 1
                request.pending_row = row
        if self._on_batch is not None:
            self._on_batch(batch)
        self._drop_padding(batch)

    def _drop_padding(self, batch: ScheduledBatch) -> None:
        """Dummies of this step leave it with nothing held and no answer."""
        for request in self.agreement.padding:
            request.finish("length")
            self.release(request)
        self.agreement.end_padding()

    def take(self, batch: ScheduledBatch, tokens: Sequence[int]) -> None:
        """Append a step's tokens. Requests that ended meanwhile get none.

        An interrupt inside the listener waits until every request has its token; ``raise_interrupt`` lets it go on.
        """
        now = self.clock()
        for request, token in zip(batch.sampled, tokens, strict=True):
            if request.state is RequestState.COMPLETE:
                continue
            request.pending_tokens = 0
            request.pending_row = None
            produced = request.output_token_ids
            produced.append(token)
            if request.timings.first_token is None:
                request.timings.first_token = now
            if token in request.end_token_ids and len(produced) >= request.params.min_tokens:
                request.finish("stop")
            elif len(produced) >= request.max_new_tokens:
                request.finish("length")
            if self.on_token is not None:
                self._tell(request)
            if request.finish_reason is not None:
                request.timings.finished = self.clock()

    def _tell(self, request: Request) -> None:
        assert self.on_token is not None
        try:
            self.on_token(request)
        except Exception as error:
            request.finish("error", f"{type(error).__name__}: {error}")
        except BaseException as interrupt:
            self._interrupt = self._interrupt or interrupt

    def settle(self, paused: Iterable[Request]) -> None:
        """Those who were paused start over, once their last token is known."""
        for request in paused:
            self.scheduler.settle_paused(request)

    def process(self, batch: ScheduledBatch) -> list[Request]:
        """Let go of who ended, then settle the rest with the managers; returns who ended."""
        ended = self._let_go(batch)
        try:
            self.resources.update(batch)
        except Exception as error:
            ended += self.fail(batch, error)
        return ended

    def _let_go(self, batch: ScheduledBatch) -> list[Request]:
        """Release the requests of a processed batch that ended and were not released before; returns them."""
        complete = RequestState.COMPLETE
        ended = [request for request in batch.requests if request.state is complete and not request.released]
        for request in ended:
            self.release(request)
        return ended

    def release(self, request: Request) -> None:
        """Every manager lets go of the request. Safe to call again."""
        self.scheduler.remove(request)
        if self._on_release is not None:
            self._on_release(request)
        self.resources.free(request)
        request.released = True

    def end_step(self, ended: list[Request]) -> list[Request]:
        """What all ranks do at the end of every step, then an interrupt that had to wait.

        Returns ``ended`` and those that end here because they failed on another rank.
        """
        failed = [request.id for request in ended if request.finish_reason == "error"]
        elsewhere = self.agreement.end_step(failed) - set(failed)
        if elsewhere:
            mine = [*self.scheduler.running, *self.scheduler.waiting]
            for request in [one for one in mine if one.id in elsewhere]:
                request.finish("error", "the request failed on another rank")
                self.release(request)
                ended.append(request)
        self.raise_interrupt()
        return ended

    def raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt
