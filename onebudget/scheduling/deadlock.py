"""Notice when nothing can ever move again, instead of spinning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import StateError

if TYPE_CHECKING:
    from onebudget.scheduling.cache import SchedulableCache
    from onebudget.scheduling.scheduler import Scheduler

PATIENCE_STEPS = 16


class DeadlockDetector:
    """Counts steps in a row in which requests wait and nothing runs, is in flight, or was put off for others."""

    def __init__(self, scheduler: Scheduler, kv: SchedulableCache, *, patience: int = PATIENCE_STEPS) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._patience = patience
        self.idle_steps = 0

    def watch(self, scheduled: int, *, in_flight: bool) -> None:
        """After scheduling. ``StateError`` with the state of the pool once patience is over."""
        if scheduled or in_flight or not self._scheduler.has_work:
            self.idle_steps = 0
            return
        self.idle_steps += 1
        if self.idle_steps >= self._patience:
            raise StateError(self.describe())

    def describe(self) -> str:
        kv, scheduler = self._kv, self._scheduler
        first = scheduler.waiting[0] if scheduler.waiting else scheduler.running[0]
        return (
            f"no request can move: {len(scheduler.waiting)} wait and {len(scheduler.running)} hold seats, nothing was "
            f"scheduled in {self.idle_steps} steps. The KV pool has {kv.max_resource_count()} blocks of "
            f"{kv.tokens_per_block} tokens, {kv.used_blocks} held and {kv.free_blocks} free; request {first.id} "
            f"({first.prompt_tokens} prompt and {first.max_new_tokens} new tokens) is the first in line and needs "
            f"{kv.needed_to_completion(first)} to completion. Cancel what holds blocks, or give the cache more memory."
        )
