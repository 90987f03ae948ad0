"""The plain step loop: schedule, prepare, forward, sample, append, free, update."""

from __future__ import annotations

import logging
import time
import traceback
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from onebudget.budget.reserves import seat_count
from onebudget.core import Request, RequestState, ScheduledBatch
from onebudget.engine.ranks import RankGroup
from onebudget.engine.sampler import Sampler
from onebudget.engine.scheduler import Scheduler
from onebudget.errors import CapacityError
from onebudget.resources import ResourceKind, ResourceManager, SequenceSlotManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from onebudget.buffers import Buffer
    from onebudget.config import BudgetConfig
    from onebudget.engine.model_runner import ModelRunner
    from onebudget.engine.stages import Stages
    from onebudget.models.load import LoadedModel
    from onebudget.resources.kv.manager import KVCacheManager

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the steps did so far."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    failed_steps: int = 0
    deferred: int = 0
    trimmed: int = 0
    paused: int = 0
    reused_tokens: int = 0
    graph_hits: int = 0
    graph_padded: int = 0
    graph_eager: int = 0
    scratch_grow: int = 0
    scratch_shrink: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Executor:
    """Serves requests step by step.

    A request ends completed, failed or cancelled, and every manager has let go of it when ``step`` returns it. A
    ``sampler`` that keeps memory per slot comes with the ``slots`` it was made for.
    """

    def __init__(
        self,
        config: BudgetConfig,
        runner: ModelRunner,
        kv: KVCacheManager,
        *,
        slots: SequenceSlotManager | None = None,
        sampler: Sampler | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.kv = kv
        self.slots = slots or SequenceSlotManager(seat_count(max_batch_size=config.max_batch_size))
        self.resources = ResourceManager({ResourceKind.SEQ_SLOT: self.slots, ResourceKind.KV: kv})
        self.sampler = sampler or Sampler(config.seed)
        self.scheduler = Scheduler(config, kv)
        self.ranks = ranks or RankGroup()
        self.counters = Counters()
        self.last_error: Exception | None = None
        self._on_token: Callable[[Request], None] | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def set_listener(self, on_token: Callable[[Request], None]) -> None:
        """Call ``on_token(request)`` after each of a request's tokens; it may finish the request."""
        self._on_token = on_token

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request between steps; what it produced stays in it. One that ended already is let go of again."""
        if not request.finished:
            request.finish("cancelled")
        self._release(request)

    def step(self) -> list[Request]:
        """One step; returns the requests that ended in it."""
        batch = self.scheduler.schedule()
        if batch.size == 0:
            return self._refuse_stuck()
        try:
            self.resources.prepare(batch)
            tokens = self.ranks.broadcast(self.runner.step(batch, self.sampler))
        except CapacityError as error:
            return self._fail([r for r in batch.requests if r.id == error.request_id] or batch.requests, error)
        except Exception as error:
            if self.ranks.shared:
                raise  # the other ranks are in the middle of the same step
            return self._fail(self.sampler.blamed(batch, error), error)
        self._count(batch)
        finished = self._append(batch, tokens)
        self.resources.update(batch)
        return finished

    def digest(self) -> int:
        """A number that is the same on all ranks that stand at the same point."""
        queued = [
            (request.id, request.computed_tokens) for request in (*self.scheduler.running, *self.scheduler.waiting)
        ]
        return zlib.crc32(repr((queued, self.kv.free_blocks)).encode())

    def _append(self, batch: ScheduledBatch, tokens: list[int]) -> list[Request]:
        for request in batch.context:
            request.computed_tokens += request.chunk_tokens
        for request in batch.generation:
            request.computed_tokens += 1
        try:
            for request, token in zip([*batch.context_last, *batch.generation], tokens, strict=True):
                self._take_token(request, token)
        finally:  # an interrupt inside the listener must not leave ended requests in their managers
            finished = [request for request in batch.requests if request.finish_reason is not None]
            for request in finished:
                self._release(request)
        return finished

    def _take_token(self, request: Request, token: int) -> None:
        request.state = RequestState.GENERATION
        request.output_token_ids.append(token)
        if request.timings.first_token is None:
            request.timings.first_token = time.perf_counter()
        produced = len(request.output_token_ids)
        if token in request.end_token_ids and produced >= request.params.min_tokens:
            request.finish("stop")
        elif produced >= request.max_new_tokens:
            request.finish("length")
        if self._on_token is not None:
            try:
                self._on_token(request)
            except Exception as error:
                request.finish("error", f"{type(error).__name__}: {error}")

    def _count(self, batch: ScheduledBatch) -> None:
        self.counters.steps += 1
        self.counters.prefill_tokens += batch.tokens - len(batch.generation)
        self.counters.decode_tokens += len(batch.generation)
        self.counters.graph_eager += 1
        self.counters.reused_tokens = self.scheduler.reused_tokens
        self.counters.deferred = self.scheduler.deferred
        self.counters.scratch_grow = self.runner.scratch.grow_count

    def _fail(self, requests: list[Request], error: Exception) -> list[Request]:
        """Refuse requests of a failed step, not the process. Others in it keep their state and are computed again."""
        logger.debug("step failed", exc_info=error)
        _let_go(error)
        self.counters.failed_steps += 1
        self.last_error = error
        for request in requests:
            self._end(request, "error", f"{type(error).__name__}: {error}")
        return requests

    def _refuse_stuck(self) -> list[Request]:
        """Nothing runs, yet the first waiting request can't start: it never will."""
        if self.scheduler.running or not self.scheduler.waiting:
            return []
        request = self.scheduler.waiting[0]
        needed, total = self.kv.needed_to_completion(request), self.kv.max_resource_count()
        self._end(request, "error", f"the request needs {needed} KV blocks to completion and the pool has {total}.")
        return [request]

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        request.finish(reason, error)  # type: ignore[arg-type]
        self._release(request)

    def _release(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.sampler.forget(request)
        self.resources.free(request)

    def buffers_of(self, stage: str, model: LoadedModel) -> list[Buffer]:
        """The device buffers of one sleeping stage."""
        if stage == "model":
            return [model.weights]
        workspace = [*self.runner.workspace_buffers, *self.sampler.buffers]
        return [self.kv.pool.buffer] if stage == "kv_cache" else workspace

    def rebuild(self, stage: str, stages: Stages) -> None:
        """New memory for a stage whose memory was lost; only for stages that lose their contents anyway."""
        if stage == "kv_cache":
            self.kv.pool.release()
            with stages.open("kv_cache"):
                self.kv.pool.allocate()
        else:
            self.runner.rebuild_workspace(stages)
            self.sampler.rebuild()

    def shutdown(self) -> None:
        """Release managers, scratch and inputs. Requests still inside are cancelled."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(request, "cancelled")
        self.sampler.release()
        self.resources.shutdown()
        self.runner.release()


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of a failed step hold: its tensors would stay on the device for as long as the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
