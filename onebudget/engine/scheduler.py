"""Who runs in the next step: generation first, then prompts in arrival order, within tokens, slots and blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.budget.context_workspace import attended_tokens, keep_prefix_within_cap
from onebudget.core import Request, RequestState, ScheduledBatch

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.resources.kv.manager import KVCacheManager


class Scheduler:
    """Guaranteed-no-evict: a request starts only when its blocks to completion are free beside those of all running.

    A prompt that does not fit in the step's tokens is cut into chunks, or waits when chunking is off. The first
    request that cannot start stops the list, so nobody is overtaken. Prompts that would attend to more than the context
    workspace covers wait for a later step, untouched; ``deferred`` counts how often one did.
    """

    def __init__(self, config: BudgetConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._reserved_blocks = 0
        self.reused_tokens = 0
        self.deferred = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request in whatever state it is."""
        if request in self.running:
            self.running.remove(request)
            self._reserved_blocks -= self._kv.needed_to_completion(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> ScheduledBatch:
        """The next step's batch; requests outside it keep their state."""
        batch = ScheduledBatch()
        for request in self.running:
            if request.state is RequestState.GENERATION:
                batch.add(request)
        pieces = self._next_pieces(self._config.max_num_tokens - len(batch.generation))
        admitted = self._within_attended_cap(pieces)
        for piece in pieces[:admitted]:
            if piece.is_first:
                self._start(self.waiting.popleft())
            piece.request.chunk_tokens = piece.tokens
            batch.add(piece.request)
        return batch

    def _next_pieces(self, tokens_left: int) -> list[_Piece]:
        """Prompt pieces that fit in the step's tokens, slots and blocks, in order; nothing is started yet."""
        pieces: list[_Piece] = []
        for request in self.running:
            if request.state is RequestState.CONTEXT and tokens_left > 0:
                pieces.append(_Piece.of(request, request.computed_tokens, tokens_left))
                tokens_left -= pieces[-1].tokens
        seats_left = self._config.max_batch_size - len(self.running)
        blocks_left = self._kv.max_resource_count() - self._reserved_blocks
        for request in self.waiting:
            blocks_left -= self._kv.needed_to_completion(request)
            seats_left -= 1
            if blocks_left < 0 or seats_left < 0 or not self._prompt_fits(request, tokens_left):
                break
            pieces.append(_Piece.of(request, self._kv.reusable_tokens(request), tokens_left, is_first=True))
            tokens_left -= pieces[-1].tokens
        return pieces

    def _prompt_fits(self, request: Request, tokens_left: int) -> bool:
        if self._config.enable_chunked_prefill:
            return tokens_left > 0
        return request.prompt_tokens - self._kv.reusable_tokens(request) <= tokens_left

    def _within_attended_cap(self, pieces: list[_Piece]) -> int:
        """How many pieces run under the admission cap of the context workspace. Dummies know no cap: what they attend
        to is what the profile saw."""
        if any(piece.request.is_dummy for piece in pieces):
            return len(pieces)
        admitted = keep_prefix_within_cap([piece.attended for piece in pieces], self._kv.attended_tokens_cap)
        self.deferred += len(pieces) - admitted
        return admitted

    def _start(self, request: Request) -> None:
        request.state = RequestState.CONTEXT
        request.computed_tokens = self._kv.begin(request)
        self.reused_tokens += 0 if request.is_dummy else request.computed_tokens
        self.running.append(request)
        self._reserved_blocks += self._kv.needed_to_completion(request)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one request would compute of its prompt, and how many tokens that attends to."""

    request: Request
    tokens: int
    attended: int
    is_first: bool

    @classmethod
    def of(cls, request: Request, cached: int, tokens_left: int, *, is_first: bool = False) -> _Piece:
        """``cached``: prompt tokens that stand in the cache, or would once the request starts."""
        tokens = min(request.prompt_tokens - cached, tokens_left)
        attended = attended_tokens(position=cached, chunk=tokens, prompt_len=request.prompt_tokens)
        return cls(request, tokens, attended, is_first)
