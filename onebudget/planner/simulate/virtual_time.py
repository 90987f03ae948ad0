"""A card that computes nothing and takes its time about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from onebudget.planner.simulate.clock import StepWork
from onebudget.planner.simulate.tokens import own_token

if TYPE_CHECKING:
    from onebudget.core import ScheduledBatch
    from onebudget.planner.simulate.clock import StepClock

Launched = Callable[[float, "ScheduledBatch"], None]


def work_of(batch: ScheduledBatch) -> StepWork:
    """What a batch computes, before its positions move on."""
    work = StepWork()
    generation = batch.generation
    work.generation_requests = len(generation)
    work.generation_kv_tokens = sum([request.computed_tokens for request in generation]) + len(generation)
    for request in batch.context:
        cached, tokens = request.computed_tokens, request.chunk_tokens
        work.prompts += 1
        work.context_tokens += tokens
        work.cached_context_tokens += cached
        work.attended_pairs += tokens * cached + tokens * (tokens + 1) // 2
    return work


class VirtualCard:
    """Computes batches in virtual time: ``now_s`` is what the host's clock shows.

    A step starts when the host has launched it and the step before is through; reading its tokens waits for its end.
    So in a loop that reads before it launches again the host's time adds to the card's, and in one that launches first
    it hides behind it. ``launched`` is told the end of every step, ``copied_bytes`` tells
    what went between tiers since the last one.
    """

    def __init__(self, clock: StepClock, launched: Launched, copied_bytes: Callable[[], int] = lambda: 0) -> None:
        self._clock = clock
        self._launched = launched
        self._copied_bytes = copied_bytes
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self.steps = 0
        self.decode_batches: Counter[int] = Counter()
        self.context_tokens = 0

    def time(self) -> float:
        return self.now_s

    def forward(self, batch: ScheduledBatch, sampled_before: object | None) -> float:
        """When the batch will be through."""
        work = work_of(batch)
        work.copied_bytes = self._copied_bytes()
        self.now_s += self._clock.host_seconds(work)
        end = max(self.now_s, self.busy_until_s) + self._clock.card_seconds(work)
        self.busy_until_s = end
        self.steps += 1
        self.context_tokens += work.context_tokens
        if batch.can_use_graph:
            self.decode_batches[work.generation_requests] += 1
        self._launched(end, batch)
        return end

    def sample(self, batch: ScheduledBatch, output: object) -> object:
        return output

    def read(self, batch: ScheduledBatch, sampled: object) -> list[int]:
        """Tokens that nobody else has, once the batch is through."""
        assert isinstance(sampled, float)
        self.now_s = max(self.now_s, sampled)
        return [own_token(request.id) for request in batch.sampled]

    def wait_until(self, moment_s: float) -> None:
        """Nothing to do before that."""
        self.now_s = max(self.now_s, moment_s)
