"""Who runs in the next step: generation first, then prompts in arrival order, within tokens, slots and blocks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from onebudget.core import Request, RequestState, ScheduledBatch

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.resources.kv.manager import KVCacheManager


class Scheduler:
    """Guaranteed-no-evict: a request starts only when its blocks to completion are free beside those of all running.

    A prompt that does not fit in the step's tokens is cut into chunks, or waits when chunking is off. The first
    request that cannot start stops the list, so nobody is overtaken.
    """

    def __init__(self, config: BudgetConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._reserved_blocks = 0
        self.reused_tokens = 0

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
        tokens_left = self._config.max_num_tokens - len(batch.generation)
        for request in self.running:
            if request.state is RequestState.CONTEXT:
                tokens_left -= self._take_chunk(request, tokens_left, batch)
        while self.waiting and tokens_left > 0 and self._can_start(self.waiting[0], tokens_left):
            request = self.waiting.popleft()
            self._start(request)
            tokens_left -= self._take_chunk(request, tokens_left, batch)
        return batch

    def _take_chunk(self, request: Request, tokens_left: int, batch: ScheduledBatch) -> int:
        request.chunk_tokens = min(request.remaining_prompt_tokens, tokens_left)
        if request.chunk_tokens > 0:
            batch.add(request)
        return request.chunk_tokens

    def _can_start(self, request: Request, tokens_left: int) -> bool:
        whole_prompt_fits = self._config.enable_chunked_prefill or request.prompt_tokens <= tokens_left
        blocks_left = self._kv.max_resource_count() - self._reserved_blocks
        return (
            whole_prompt_fits
            and len(self.running) < self._config.max_batch_size
            and self._kv.needed_to_completion(request) <= blocks_left
        )

    def _start(self, request: Request) -> None:
        request.state = RequestState.CONTEXT
        request.computed_tokens = self._kv.begin(request)
        self.reused_tokens += request.computed_tokens
        self.running.append(request)
        self._reserved_blocks += self._kv.needed_to_completion(request)
