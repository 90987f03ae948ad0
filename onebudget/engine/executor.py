"""Serves requests step by step: the loop over scheduler, managers and model runner, and what happens when it fails."""

from __future__ import annotations

import logging
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from onebudget.budget.reserves import seat_count
from onebudget.core import Request, ScheduledBatch
from onebudget.engine.failures import ContextLimit, ErrorBudget, classify, is_out_of_memory, may_retry
from onebudget.engine.ranks import RankGroup
from onebudget.engine.sampler import Sampler
from onebudget.errors import AgreementError, CapacityError, StateError
from onebudget.resources import ResourceKind, ResourceManager, SequenceSlotManager
from onebudget.resources.kv.rebalance import rebalancer
from onebudget.scheduling import Scheduler, fit_token_budget
from onebudget.scheduling.moments import Moments
from onebudget.scheduling.overlap import OverlapLoop
from onebudget.scheduling.plain import PlainLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from onebudget.buffers import Buffer
    from onebudget.config import BudgetConfig
    from onebudget.engine.model_runner import ModelRunner
    from onebudget.engine.stages import Stages
    from onebudget.models.load import LoadedModel
    from onebudget.resources.kv.manager import KVCacheManager
    from onebudget.scheduling.agreement import Agreement

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the steps did so far.

    ``deferred``: times a prompt waited because of the cap on attended tokens; ``skipped``: to reuse what another was
    computing; ``trimmed``: tokens that the token fit postponed; ``retried``: steps that ran again after memory ran out;
    ``padded``: steps that this rank joined with a dummy, because only others had work; ``postponed``: steps for which
    another rank had no batch.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    failed_steps: int = 0
    retried_steps: int = 0
    deferred: int = 0
    skipped: int = 0
    trimmed: int = 0
    paused: int = 0
    resumed: int = 0
    recomputed_tokens: int = 0
    reused_tokens: int = 0
    graph_hits: int = 0
    graph_padded: int = 0
    graph_eager: int = 0
    scratch_grow: int = 0
    scratch_shrink: int = 0
    padded_steps: int = 0
    postponed_steps: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Executor:
    """Serves requests step by step, with one step in flight behind the host when ``config.overlap`` is on.

    A request ends completed, failed or cancelled, and every manager has let go of it when ``step`` returns it. A
    ``sampler`` that keeps memory per slot comes with the ``slots`` it was made for. ``publish`` is told each batch that
    will be computed. ``headroom``: seats and admission for requests that come while others are about to end.
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
        agreement: Agreement | None = None,
        publish: Callable[[ScheduledBatch], object] | None = None,
        headroom: bool = False,
    ) -> None:
        self.config = config
        self.runner = runner
        self.kv = kv
        seats = seat_count(max_batch_size=config.max_batch_size, headroom=headroom, overlap=config.overlap)
        self.slots = slots or SequenceSlotManager(seats + (agreement is not None))
        self.resources = ResourceManager(
            {ResourceKind.SEQ_SLOT: self.slots, ResourceKind.KV: kv}, fit=self._fit, publish=publish
        )
        self.sampler = sampler or Sampler(config.seed)
        self.scheduler = Scheduler(config, kv, headroom=headroom)
        self.ranks = ranks or RankGroup()
        self.agreement = agreement
        self.amid_forward = False
        self.counters = Counters()
        self.last_error: Exception | None = None
        self.error_budget = ErrorBudget()
        self.stopped: str | None = None
        self._context_limit = ContextLimit(config.max_num_tokens, config.tokens_per_block)
        self._cancelled: set[int] = set()
        self._drained: list[Request] = []
        self._steps_begun = 0
        self._report: Callable[[], dict[str, Any]] | None = None
        self._moments = Moments(
            self.scheduler,
            self.resources,
            kv,
            _RunnerModel(self),
            agreement=agreement,
            on_batch=self._count,
            on_failure=self._failed,
            on_release=self.sampler.forget,
            on_pause=self.sampler.vacate,
        )
        self._loop: PlainLoop | OverlapLoop = (OverlapLoop if config.overlap else PlainLoop)(self._moments)
        self.rebalancer = rebalancer(kv, config, peers=self.ranks, apart=agreement is not None)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def set_listener(self, on_token: Callable[[Request], None]) -> None:
        """Call ``on_token(request)`` after each of a request's tokens; it may finish the request."""
        self._moments.on_token = on_token

    def set_reporter(self, report: Callable[[], dict[str, Any]]) -> None:
        """What ``memory_report`` asks: the engine knows the ledger, an executor alone does not."""
        self._report = report

    def memory_report(self) -> dict[str, Any]:
        """The live ledger of the engine this executor belongs to; ``StateError`` for one on its own."""
        if self._report is None:
            raise StateError("this executor belongs to no engine, so there is no ledger to report on")
        return self._report()

    def submit(self, request: Request) -> None:
        """``StateError`` after the engine stopped."""
        if self.stopped is not None:
            raise StateError(self.stopped)
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request between steps; what it produced stays in it. One that ended already is let go of again.

        What a launched step still needs is let go of when that step is processed.
        """
        if not request.finished:
            request.finish("cancelled")
        if not self._loop.in_flight(request):
            self._moments.release(request)
            return
        self._cancelled.add(request.id)
        if all(one.finished for one in (*self.scheduler.running, *self.scheduler.waiting)):
            self.drain()

    def drain(self) -> None:
        """Process the step in flight, so that what it computed counts; who ends with it is returned by ``step``."""
        self._drained += [request for request in self._loop.drain() if request.id not in self._cancelled]
        self._cancelled.clear()

    def step(self) -> list[Request]:
        """One step; returns the requests that ended in it, and those that a ``drain`` before it ended."""
        drained, self._drained = self._drained, []
        return drained + self._step()

    def _step(self) -> list[Request]:
        if self.stopped is not None:
            return self._end_all(self.stopped)
        self._moments.scheduled = 0
        self._steps_begun += 1
        ended = [request for request in self._loop.step() if request.id not in self._cancelled]
        self._cancelled.intersection_update(request.id for request in self.scheduler.running)
        if self.rebalancer is not None:
            self.rebalancer.after_step()
        self.counters.padded_steps = self._moments.agreement.padded_steps
        self.counters.postponed_steps = self._moments.agreement.postponed_steps
        if self.error_budget.exhausted:
            return ended + self._stop()
        return ended or self._refuse_stuck()

    @contextmanager
    def plain_steps(self) -> Iterator[None]:
        """Inside, every step is through when ``step`` returns: profiles see the shapes they mean to."""
        self.drain()
        before, self._loop = self._loop, PlainLoop(self._moments)
        try:
            yield
        finally:
            self._loop = before

    def digest(self) -> int:
        """A number that is the same on all ranks that stand at the same point."""
        if self.agreement is not None:
            return self._steps_begun
        queued = [
            (request.id, request.computed_tokens) for request in (*self.scheduler.running, *self.scheduler.waiting)
        ]
        return zlib.crc32(repr((queued, self.kv.free_blocks)).encode())

    def _fit(self, batch: ScheduledBatch) -> None:
        fit = fit_token_budget(
            batch,
            self.config.max_num_tokens,
            self.config.tokens_per_block,
            chunked=self.config.enable_chunked_prefill,
            beam_width=self.config.max_beam_width,
        )
        self.counters.trimmed += fit.trimmed

    def _count(self, batch: ScheduledBatch) -> None:
        counters, scheduler = self.counters, self.scheduler
        counters.steps += 1
        context_tokens = batch.context_tokens
        counters.prefill_tokens += context_tokens
        counters.decode_tokens += len(batch.generation) - len(self._moments.agreement.padding)
        counters.reused_tokens = scheduler.reused_tokens
        counters.deferred, counters.skipped = scheduler.deferred, scheduler.skipped
        counters.paused, counters.resumed = scheduler.paused, scheduler.resumed
        counters.recomputed_tokens = scheduler.recomputed_tokens
        self.runner.count(counters)
        self.error_budget.regain()
        if self._context_limit.lowered:
            self._context_limit.passed()
            scheduler.max_context_tokens = self._context_limit.tokens

    # -- failures ---------------------------------------------------------------------------------------------

    def _failed(self, batch: ScheduledBatch, error: Exception) -> list[Request]:
        """End the requests that a failed step takes with it; the others keep their state and are computed again."""
        if self._others_wait(error):
            raise error
        if isinstance(error, CapacityError):
            named = [request for request in batch.requests if request.id == error.request_id]
            if len(named) == 1 and self._moments.give_way(named[0]):
                return []
            return self._fail(named or batch.requests, error)
        blamed = self.sampler.blamed(batch, error)
        if len(blamed) == batch.size or classify(error) == "fatal":  # what one request alone caused is no sign of more
            self.error_budget.charge(classify(error))
            if is_out_of_memory(error) and self._context_limit.failed(self.counters.steps):
                self.scheduler.max_context_tokens = self._context_limit.tokens
        return self._fail(blamed, error)

    def _others_wait(self, error: Exception) -> bool:
        """Whether other ranks are in the middle of what failed here, so that all of them end.

        Ranks with requests of their own meet inside the forward alone; others do the same in the whole step, running
        short of blocks included.
        """
        if self.agreement is None:
            return self.ranks.shared and not isinstance(error, CapacityError)
        return self.amid_forward or isinstance(error, AgreementError)

    def _fail(self, requests: list[Request], error: Exception) -> list[Request]:
        logger.debug("step failed", exc_info=error)
        _let_go(error)
        self.counters.failed_steps += 1
        self.last_error = error
        failed = [request for request in requests if not request.released]
        for request in failed:
            self._end(request, "error", f"{type(error).__name__}: {error}")
        return failed

    def _stop(self) -> list[Request]:
        """Too much went wrong: nothing is computed any more, and nothing asked of the device."""
        error = self.last_error
        self.stopped = (
            f"the engine stopped after {self.counters.failed_steps} failed steps; the last one: "
            f"{type(error).__name__}: {error}"
        )
        logger.error("%s", self.stopped)
        if self.agreement is not None:
            raise StateError(self.stopped)  # the others would wait for this rank in the next step
        return self._end_all(self.stopped)

    def _end_all(self, reason: str) -> list[Request]:
        self._loop.forget()
        ended = [*self.scheduler.running, *self.scheduler.waiting]
        for request in ended:
            self._end(request, "error", reason)
        return ended

    def _refuse_stuck(self) -> list[Request]:
        """Nothing runs, yet the first waiting request can't start: it never will."""
        if self._moments.scheduled or self.scheduler.running or not self.scheduler.waiting:
            return []
        request = self.scheduler.waiting[0]
        needed, total = self.kv.needed_to_completion(request), self.kv.max_resource_count()
        if needed <= total:
            return []
        self._end(request, "error", f"the request needs {needed} KV blocks to completion and the pool has {total}.")
        return [request]

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        if not request.finished:
            request.finish(reason, error)  # type: ignore[arg-type]
        self._moments.release(request)

    # -- memory -----------------------------------------------------------------------------------------------

    def buffers_of(self, stage: str, model: LoadedModel) -> list[Buffer]:
        """The device buffers of one sleeping stage."""
        if stage == "model":
            return [model.weights]
        workspace = [*self.runner.workspace_buffers, *self.sampler.buffers]
        return [pool.buffer for pool in self.kv.pools] if stage == "kv_cache" else workspace

    def rebuild(self, stage: str, stages: Stages) -> None:
        """New memory for a stage whose memory was lost; only for stages that lose their contents anyway."""
        self.runner.drop_graphs()
        if stage == "kv_cache":
            for pool in self.kv.pools:
                pool.release()
                with stages.open("kv_cache"):
                    pool.allocate()
        else:
            self.runner.rebuild_workspace(stages)
            self.sampler.rebuild()

    def shutdown(self) -> None:
        """Release managers, scratch and inputs. Requests still inside are cancelled."""
        if self.stopped is None:
            with suppress(Exception):
                self.drain()
        self._loop.forget()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(request, "cancelled")
        self.sampler.release()
        self.resources.shutdown()
        self.runner.release()


class _RunnerModel:
    """The executor's runner and sampler as a loop sees them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def forward(self, batch: ScheduledBatch, sampled_before: object | None) -> object:
        self._executor.amid_forward = True
        output = self._forward(batch)
        self._executor.amid_forward = False
        return output

    def _forward(self, batch: ScheduledBatch) -> object:
        runner = self._executor.runner
        try:
            return runner.forward(batch)
        except Exception as error:
            if not is_out_of_memory(error) or not self._relieved(batch, error):
                raise
        self._executor.counters.retried_steps += 1
        return runner.forward(batch)

    def _relieved(self, batch: ScheduledBatch, error: Exception) -> bool:
        """Give back what no request needs; whether the batch may run once more."""
        executor = self._executor
        if len(executor.sampler.blamed(batch, error)) < batch.size or executor.ranks.shared:
            return False
        _let_go(error)
        relief = executor.runner.relieve()
        if relief is None:
            return False
        logger.warning("memory ran out inside a step: %s %s", error, relief)
        return may_retry(error, relief, kv_written=executor.runner.kv_written)

    def sample(self, batch: ScheduledBatch, output: Any) -> Any:
        executor = self._executor
        sampled = executor.runner.sample(batch, output, executor.sampler)
        if not executor.ranks.shared or executor.agreement is not None:
            return sampled
        # Ranks may round differently: what rank 0 sampled is where all of them go on.
        tokens = executor.ranks.broadcast(sampled.read())
        executor.runner.set_sampled(tokens)
        return tokens

    def read(self, batch: ScheduledBatch, sampled: Any) -> list[int]:
        return sampled if isinstance(sampled, list) else list(sampled.read())


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of a failed step hold: its tensors would stay on the device for as long as the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
