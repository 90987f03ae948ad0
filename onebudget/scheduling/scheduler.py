"""Who runs in the next step: generation first, then contexts in order of arrival, within tokens, seats and blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onebudget.core import Request, RequestState, ScheduledBatch
from onebudget.errors import ConfigError
from onebudget.scheduling.capacity import NO_LIMIT, make_policy, scheduler_capacity
from onebudget.scheduling.chunks import ChunkPolicy, chunk_unit, equal_chunks, next_chunk
from onebudget.scheduling.filters import AttendedCap, BatchWait, PostFilter, RecurrentCapacity, StepLoad
from onebudget.scheduling.pieces import Piece
from onebudget.scheduling.prefix_skip import PrefixSkip

if TYPE_CHECKING:
    from collections.abc import Callable

    from onebudget.config import BudgetConfig
    from onebudget.scheduling.cache import SchedulableCache


logger = logging.getLogger(__name__)


class Scheduler:
    """Chooses batches and follows who waits and who runs.

    A context that does not fit in the step's tokens is cut into chunks, or waits when chunking is off. The first
    request that cannot start stops the list, so nobody is overtaken, except by a step where waiting lets a request
    reuse what another is computing. Costs per step depend on the running requests alone.

    ``headroom``: a request whose last token is on its way gives its place up at once; seats must be plenty then.
    ``balance`` is the first of the post-filters, ``free_states`` counts slots of recurrent layers.
    """

    def __init__(
        self,
        config: BudgetConfig,
        kv: SchedulableCache,
        *,
        pp_size: int = 1,
        attention_dp: bool = False,
        headroom: bool = False,
        chunk_policy: ChunkPolicy = "first_come_first_served",
        balance: PostFilter | None = None,
        free_states: Callable[[], int] | None = None,
    ) -> None:
        if chunk_policy == "equal_progress" and config.scheduler_policy == "max_utilization":
            raise ConfigError.for_field(
                "chunk_policy", chunk_policy, "first_come_first_served where blocks are given out step by step"
            )
        self._kv = kv
        self._is_v2 = config.kv_cache_manager == "v2"
        if self._is_v2 and "scheduler_policy" in config.given and config.scheduler_policy != "max_utilization":
            logger.warning(
                "the v2 cache manager knows max_utilization only; scheduler_policy %r is not used",
                config.scheduler_policy,
            )
        self._policy = make_policy(
            "max_utilization" if self._is_v2 else config.scheduler_policy,
            kv,
            pp_size=pp_size,
            max_util_for_resume=config.max_util_for_resume if self._is_v2 else 1.0,
        )
        self._capacity = scheduler_capacity(
            config.max_batch_size, pp_size=pp_size, is_v2=self._is_v2, attention_dp=attention_dp
        )
        self._headroom = headroom
        self._max_num_tokens = config.max_num_tokens
        self._chunked = config.enable_chunked_prefill
        self._unit = chunk_unit(config.tokens_per_block, sliding_windows=bool(config.max_attention_window))
        self._chunk_policy = chunk_policy
        self._skip = PrefixSkip(kv, overlap=config.overlap) if config.enable_block_reuse else None
        self._cap = AttendedCap(kv)
        self._filters: list[PostFilter] = [
            *([balance] if balance is not None else []),
            *([BatchWait(*config.batch_wait, config.max_num_tokens)] if config.batch_wait is not None else []),
            *([RecurrentCapacity(free_states)] if free_states is not None else []),
            self._cap,
        ]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.max_context_tokens = config.max_num_tokens
        """Context tokens of a step; lowered where steps of full size ran out of memory."""
        self.reused_tokens = 0
        self.paused = 0
        self.recomputed_tokens = 0
        self.resumed = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_more_to_compute(self) -> bool:
        """Whether anybody waits or needs a further step: last tokens on their way need none."""
        return bool(self.waiting) or any(request.state <= RequestState.GENERATION for request in self.running)

    @property
    def deferred(self) -> int:
        """How often a context was held back by the cap on attended tokens."""
        return self._cap.deferred

    @property
    def skipped(self) -> int:
        """How often a request waited for a step to reuse what another was computing."""
        return self._skip.skipped if self._skip is not None else 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request in whatever state it is."""
        if request in self.running:
            self.running.remove(request)
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _leave(self, request: Request) -> None:
        self._policy.left(request)
        if self._skip is not None:
            self._skip.left(request)

    # -- a step -----------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """The next step's batch; requests outside it keep their state.

        ``paused`` have given their blocks back (or are suspended) and wait again; whoever drives the steps calls
        ``pause`` of each once its last token is known.
        """
        batch = ScheduledBatch()
        if self._skip is not None:
            self._skip.begin_step()
        batch.generation = self._policy.generation(self.running, lambda request: self._pause(request, batch))
        self._resume(batch)
        tokens = len(batch.generation)
        if any(request.draft_tokens for request in batch.generation):
            tokens += sum(len(request.draft_tokens) for request in batch.generation)
        tokens_left = min(self._max_num_tokens - tokens, self.max_context_tokens)
        pieces = self._pieces(tokens_left)
        if self._chunk_policy == "equal_progress":
            self._spread(pieces, tokens_left)
        for keep in self._filters:
            pieces = keep(pieces, StepLoad(len(batch.generation), tokens))
        for piece in pieces:
            self._run(piece, batch)
        return batch

    def begin(self, batch: ScheduledBatch) -> None:
        """Let the requests of the batch that are new to the cache hold what it has of them; called when the batch is
        certain to run, before the managers prepare it.

        The reuse found is what counts from here on: a last chunk stays the whole rest of its context, so less reuse
        than admission expected makes it longer, and the token fit cuts it.
        """
        first = [request for request in batch.context if not request.begun]
        if not first:
            return
        ends = [request.is_last_chunk for request in first]
        for request, cached, was_last in zip(first, self._kv.begin_all(first), ends, strict=True):
            request.begun = True
            planned_end = request.computed_tokens + request.chunk_tokens
            request.computed_tokens = cached
            remaining = request.remaining_prompt_tokens
            request.chunk_tokens = remaining if was_last else min(request.chunk_tokens, remaining)
            if request.reusable_estimate < cached < planned_end:  # blocks were counted up to there
                request.chunk_tokens = planned_end - cached
            self.reused_tokens += 0 if request.is_dummy else cached
        batch.rebin()

    def _pieces(self, tokens_left: int) -> list[Piece]:
        """Context pieces that fit in the step's tokens, seats and blocks, in order; nothing is started yet."""
        pieces: list[Piece] = []
        for request in self.running:
            if tokens_left <= 0:
                break
            if request.state is RequestState.CONTEXT:
                piece = self._next_piece(request, tokens_left, is_first=not pieces)
                if piece is not None:
                    pieces.append(piece)
                    tokens_left -= piece.tokens + len(request.draft_tokens)
        for request in self._startable(tokens_left):
            cached = self._kv.reusable_tokens(request)
            tokens = self._chunk(request, cached, tokens_left, is_first=not pieces)
            if tokens == 0 or not self._policy.admits(request, cached, tokens):
                break
            pieces.append(Piece(request, cached, tokens, is_new=True))
            if self._skip is not None:
                self._skip.announce(request, is_last_chunk=cached + tokens >= request.context_tokens)
            tokens_left -= tokens
            if tokens_left <= 0:
                break
        return pieces

    def _next_piece(self, request: Request, tokens_left: int, *, is_first: bool) -> Piece | None:
        """The next piece of a running request."""
        position = request.computed_tokens if request.begun else self._kv.reusable_tokens(request)
        room = self._policy.room(request, position)
        if room < NO_LIMIT:
            tokens_left = min(tokens_left, room)
        tokens = self._chunk(request, position, tokens_left, is_first=is_first)
        if tokens == 0:
            return None
        self._policy.charge(request, position, tokens)
        if self._skip is not None:
            self._skip.contributes(request, is_last_chunk=position + tokens >= request.context_tokens)
        return Piece(request, position, tokens)

    def _chunk(self, request: Request, position: int, tokens_left: int, *, is_first: bool) -> int:
        if self._chunk_policy == "equal_progress":
            tokens_left = min(tokens_left, self._unit)  # a unit for each who can run; what is left is spread later
        # A paused request comes back with its answer, and an emergency lowers the limit: both may exceed one step.
        chunked = self._chunked or request.context_tokens > self.max_context_tokens
        return next_chunk(
            position, request.context_tokens, tokens_left, unit=self._unit, chunked=chunked, is_first=is_first
        )

    def _startable(self, tokens_left: int) -> Iterator[Request]:
        """Waiting requests that have a seat and may hold blocks, in order; those put off for reuse are passed over."""
        seats_left = self._capacity - self._seated
        put_off = 0
        for request in self.waiting:
            if seats_left <= 0 or tokens_left <= 0 or request.suspended or not self._policy.may_start(request):
                return
            if self._skip is not None and self._skip.puts_off(request):
                put_off += 1
                if put_off > self._capacity:
                    return
                continue
            seats_left -= 1
            yield request

    @property
    def _seated(self) -> int:
        if not self._headroom:
            return len(self.running)
        return sum([request.state <= RequestState.GENERATION for request in self.running])

    def _spread(self, pieces: Sequence[Piece], tokens_left: int) -> None:
        """The same pieces with equal progress instead of the first taking all."""
        remaining = [piece.request.context_tokens - piece.cached for piece in pieces]
        for piece, tokens in zip(pieces, equal_chunks(remaining, tokens_left, self._unit), strict=True):
            piece.tokens = tokens or piece.tokens

    def _run(self, piece: Piece, batch: ScheduledBatch) -> None:
        request = piece.request
        if piece.is_new:
            self.waiting.remove(request)
            request.state = RequestState.CONTEXT
            self.running.append(request)
            self._policy.started(request)
            if self._skip is not None:
                self._skip.started(request)
        if not request.begun:
            request.reusable_estimate = request.computed_tokens = piece.cached
        request.chunk_tokens = piece.tokens
        batch.add(request)

    # -- pauses -----------------------------------------------------------------------------------------------

    def _pause(self, request: Request, batch: ScheduledBatch) -> None:
        """Give a running request's blocks back, or move them off the device; it is the first to start again."""
        request.suspended = request.begun and self._kv.suspend(request)
        if not request.suspended:
            self._kv.free(request)
        self.running.remove(request)
        self._leave(request)
        self.waiting.appendleft(request)
        batch.paused.append(request)
        request.pauses += 1
        self.paused += 1

    def give_way(self, request: Request) -> bool:
        """A running request that found no blocks starts over later; False where pausing is not the policy, or it is
        alone, so that waiting would not help."""
        if not self._policy.pauses or request not in self.running or len(self.running) < 2:
            return False
        self._pause(request, ScheduledBatch())
        return True

    def settle_paused(self, request: Request) -> None:
        """After a pause, once the request's tokens are all known."""
        if request.finished:
            return
        if request.suspended:
            request.state, request.chunk_tokens = RequestState.WAITING, 0
        else:
            self.recomputed_tokens += request.computed_tokens
            request.pause()

    def _resume(self, batch: ScheduledBatch) -> None:
        """Suspended requests at the head of the list come back to the device."""
        while self.waiting and self.waiting[0].suspended and not batch.paused:
            request = self.waiting[0]
            is_generating = request.computed_tokens >= request.context_tokens
            if len(batch.generation) >= self._max_num_tokens or self._seated >= self._capacity:
                return
            if not self._policy.resumes(request) or not self._kv.resume(request):
                return
            self.waiting.popleft()
            request.suspended = False
            request.state = RequestState.GENERATION if is_generating else RequestState.CONTEXT
            self.running.append(request)
            self._policy.started(request)
            self.resumed += 1
            if is_generating:
                batch.generation.append(request)
