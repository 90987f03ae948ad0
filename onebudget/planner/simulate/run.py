"""A trace through the scheduler, the managers and the step loop of the engine, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onebudget.budget.reserves import seat_count
from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams, Timings
from onebudget.errors import CapacityError, ConfigError
from onebudget.planner.simulate.books import CopyMeter, CountedPool, counted_kv_manager
from onebudget.planner.simulate.context_parallel import first_rank, rank_config, rank_notes
from onebudget.planner.simulate.result import KVUse, RequestCounts, SimulationResult, Spread, StepCounts
from onebudget.planner.simulate.timeline import Timeline
from onebudget.planner.simulate.tokens import prompt_token_ids
from onebudget.planner.simulate.virtual_time import VirtualCard
from onebudget.progress import SilentProgress
from onebudget.resources import ResourceKind, ResourceManager, SequenceSlotManager
from onebudget.resources.kv.rebalance import rebalancer
from onebudget.scheduling.helix import HelixScheduler
from onebudget.scheduling.moments import Moments
from onebudget.scheduling.overlap import OverlapLoop
from onebudget.scheduling.plain import PlainLoop
from onebudget.scheduling.scheduler import Scheduler
from onebudget.scheduling.token_fit import fit_token_budget
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import ScheduledBatch
    from onebudget.planner.simulate.clock import StepClock
    from onebudget.planner.simulate.traces import Trace, TraceRequest
    from onebudget.progress import Progress

STATED_KNOBS = (
    "max_seq_len", "max_batch_size", "max_num_tokens", "tokens_per_block", "kv_cache_manager", "enable_block_reuse",
    "enable_chunked_prefill", "scheduler_policy", "batch_wait", "overlap", "max_util_for_resume", "host_cache_bytes",
    "disk_cache_bytes", "kv_pool_rebalance",
)  # fmt: skip
UNKNOWN_ANSWERS = "Answers are taken to differ from everything else: only prompts are found in the cache."
NO_PREFIXES = "The trace names no prefixes: nothing is reused between requests."


def simulate(
    trace: Trace,
    *,
    kv_blocks: int | Sequence[CountedPool],
    clock: StepClock,
    config: BudgetConfig | None = None,
    tokens_per_block: int | None = None,
    attended_tokens_cap: int | None = None,
    cp_size: int = 1,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> SimulationResult:
    """Serve the whole trace and say what came of it.

    ``kv_blocks``: blocks of the one pool, or a pool per attention window. ``config`` are the knobs of the engine; left
    out, its defaults with a ``max_seq_len`` that takes the longest request. ``tokens_per_block`` overrides that of the
    config. With a ``cp_size`` above 1 the pool is that of rank 0 of so many ranks that share every request. Requests
    that can never run are refused and counted, as at submission. ``notes`` stand in the result.
    """
    config = config or BudgetConfig(max_seq_len=max(1, trace.longest_tokens))
    if tokens_per_block is not None:
        config = config.replace(tokens_per_block=tokens_per_block)
    if not trace.requests:
        raise ConfigError.for_field("trace", trace.name, "of at least one request")
    pools = [CountedPool(kv_blocks)] if isinstance(kv_blocks, int) else list(kv_blocks)
    simulation = Simulation(trace, pools, config, clock, attended_tokens_cap=attended_tokens_cap, cp_size=cp_size)
    with (progress or SilentProgress()).stage("requests", len(trace.requests)) as stage:
        while not simulation.done:
            stage.advance(simulation.advance())
    return simulation.result(notes)


class Simulation:
    """The engine's parts around a virtual card, and the trace's requests on their way through them."""

    def __init__(
        self,
        trace: Trace,
        pools: Sequence[CountedPool],
        config: BudgetConfig,
        clock: StepClock,
        *,
        attended_tokens_cap: int | None = None,
        cp_size: int = 1,
    ) -> None:
        helix = first_rank(cp_size)
        self._trace = trace
        self._config = config = rank_config(config, helix)
        self._clock = clock
        meter = CopyMeter()
        self.kv = counted_kv_manager(pools, config, attended_tokens_cap=attended_tokens_cap, helix=helix, meter=meter)
        self.card = VirtualCard(clock, self._launched, meter.take)
        slots = SequenceSlotManager(seat_count(max_batch_size=config.max_batch_size))
        self.resources = ResourceManager({ResourceKind.SEQ_SLOT: slots, ResourceKind.KV: self.kv}, fit=self._fit)
        self.scheduler = Scheduler(config, self.kv) if helix is None else HelixScheduler(config, self.kv, helix)
        self._moments = Moments(
            self.scheduler, self.resources, self.kv, self.card, clock=self.card.time, on_failure=self._fail
        )
        self.loop = OverlapLoop(self._moments) if config.overlap else PlainLoop(self._moments)
        self.rebalancer = rebalancer(self.kv, config, clock=self.card.time)
        self._next = 0
        self._refused = self._failed = self._finished = 0
        self._trimmed = 0
        self._prompt_tokens = self._generated = 0
        self._found = Found(config.tokens_per_block)
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._last: list[float] = []
        self._timeline = Timeline()
        self._recorded_s = 0.0
        self._block_seconds = 0.0

    @property
    def done(self) -> bool:
        return self._next == len(self._trace.requests) and not self.scheduler.has_work

    def advance(self) -> int:
        """Everything up to the end of one step, or to the next arrival; returns how many requests ended."""
        refused = self._refused
        self._submit_arrived()
        if not self.scheduler.has_work:
            self._wait_for_arrival()
            return self._refused - refused
        steps = self.card.steps
        ended = self.loop.step()
        if self.rebalancer is not None:
            self.rebalancer.after_step()
        if self.card.steps == steps and not ended:
            ended = self._stuck()
        for request in ended:
            self._count(request)
        return len(ended) + self._refused - refused

    # -- arrivals -----------------------------------------------------------------------------------------------

    def _submit_arrived(self) -> None:
        requests, now = self._trace.requests, self.card.now_s
        while self._next < len(requests) and requests[self._next].arrival_s <= now:
            self._submit(requests[self._next], self._next)
            self._next += 1

    def _submit(self, traced: TraceRequest, number: int) -> None:
        config = self._config
        new_tokens = min(traced.output_tokens, config.max_seq_len - traced.prompt_tokens + 1)
        unchunked = traced.prompt_tokens > config.max_num_tokens and not config.enable_chunked_prefill
        if new_tokens < 1 or unchunked:
            self._refused += 1
            return
        request = Request(
            number,
            prompt_token_ids(traced, number),  # type: ignore[arg-type]
            _PARAMS,
            max_new_tokens=new_tokens,
            timings=Timings(submitted=traced.arrival_s),
            arrival=traced.arrival_s,
        )
        if any(required > capacity for _, required, capacity in self.resources.block_budgets(request)):
            self._refused += 1
            return
        self._prompt_tokens += traced.prompt_tokens
        self.scheduler.add(request)

    def _wait_for_arrival(self) -> None:
        if self._next < len(self._trace.requests):
            self.card.wait_until(self._trace.requests[self._next].arrival_s)
            self._record(self.card.now_s, 0)

    def _stuck(self) -> list[Request]:
        """Nothing ran and nothing ended: time goes on to the next arrival. When nobody comes any more, the first
        request in line will never run."""
        if self._next < len(self._trace.requests):
            self._wait_for_arrival()
            return []
        queue = self.scheduler.waiting or self.scheduler.running
        return self._end([queue[0]], "it waits for blocks that nobody will give back")

    # -- steps --------------------------------------------------------------------------------------------------

    def _fit(self, batch: ScheduledBatch) -> None:
        config = self._config
        fitted = fit_token_budget(
            batch, config.max_num_tokens, config.tokens_per_block, chunked=config.enable_chunked_prefill
        )
        self._trimmed += fitted.trimmed

    def _launched(self, end_s: float, batch: ScheduledBatch) -> None:
        self._record(end_s, batch.size)
        for request in batch.context:
            self._found.see(request)

    def _record(self, end_s: float, batch: int) -> None:
        used = self.kv.used_blocks
        self._timeline.record(self._recorded_s, end_s, used, batch, len(self.scheduler.waiting))
        self._block_seconds += used * (end_s - self._recorded_s)
        self._recorded_s = end_s

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[Request]:
        """Blocks ran out: the request that found none ends, or all where nobody is named."""
        if not isinstance(error, CapacityError):
            raise error
        blamed = [request for request in batch.requests if request.id == error.request_id]
        return self._end(blamed or batch.requests, str(error))

    def _end(self, requests: list[Request], reason: str) -> list[Request]:
        for request in requests:
            request.finish("error", reason)
            self._moments.release(request)
        return requests

    def _count(self, request: Request) -> None:
        self._found.forget(request)
        produced, first = len(request.output_token_ids), request.timings.first_token
        self._generated += produced
        if request.finish_reason == "error" or first is None:
            self._failed += 1
            return
        self._finished += 1
        finished = request.timings.finished
        assert finished is not None
        self._first.append(first - request.arrival)
        self._last.append(finished - request.arrival)
        if produced > 1:
            self._gaps.append((finished - first) / (produced - 1))

    # -- what came of it ----------------------------------------------------------------------------------------

    def result(self, notes: Sequence[str] = ()) -> SimulationResult:
        end_s = max(self._recorded_s, self.card.now_s)
        return SimulationResult(
            trace=self._trace.name,
            requests=RequestCounts(
                submitted=len(self._trace.requests),
                finished=self._finished,
                refused=self._refused,
                failed=self._failed,
            ),
            steps=self._steps(),
            kv=self._kv_use(end_s),
            virtual_s=end_s,
            time_to_first_token=Spread.of(self._first),
            time_per_token=Spread.of(self._gaps),
            time_to_last_token=Spread.of(self._last),
            batch_size_histogram=dict(sorted(self.card.decode_batches.items())),
            timeline=self._timeline.points(end_s),
            clock=self._clock.stated(),
            settings=self._settings(),
            notes=(*self._notes(), *notes),
        )

    def _steps(self) -> StepCounts:
        return StepCounts(
            total=self.card.steps,
            decode=self.card.decode_batches.total(),
            context_tokens=self.card.context_tokens,
            generation_tokens=self._generated,
            deferred=self.scheduler.deferred,
            skipped=self.scheduler.skipped,
            paused=self.scheduler.paused,
            trimmed=self._trimmed,
        )

    def _kv_use(self, end_s: float) -> KVUse:
        counters = self.kv.counters
        return KVUse(
            blocks=self.kv.max_resource_count(),
            tokens_per_block=self.kv.tokens_per_block,
            peak_used_blocks=self.kv.peak_used_blocks,
            mean_used_blocks=self._block_seconds / end_s if end_s else 0.0,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._found.tokens,
            reused_blocks=self._found.blocks,
            missed_blocks=self._found.missed_blocks,
            counters=counters.to_dict(),
        )

    def _settings(self) -> dict[str, Any]:
        helix = self.kv.helix
        ranks = {} if helix is None else {"cp_size": helix.cp_size}
        return {name: getattr(self._config, name) for name in STATED_KNOBS} | ranks

    def _notes(self) -> tuple[str, ...]:
        if self.kv.helix is not None:
            return rank_notes(self.kv.helix)
        prefixes = any(request.prefix_ids is not None for request in self._trace.requests)
        return (UNKNOWN_ANSWERS if prefixes else NO_PREFIXES,)


class Found:
    """What prompts found in the cache when they began; what a paused one finds of itself later does not count."""

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._begun: set[int] = set()
        self.tokens = 0
        self.missed_blocks = 0

    @property
    def blocks(self) -> int:
        return self.tokens // self._size

    def see(self, request: Request) -> None:
        """A request with context in a step that is about to run."""
        if request.id not in self._begun:
            self._begun.add(request.id)
            self.tokens += request.computed_tokens
            self.missed_blocks += ceil_div(request.prompt_tokens - request.computed_tokens, self._size)

    def forget(self, request: Request) -> None:
        self._begun.discard(request.id)


_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
