"""Who may hold blocks: the capacity policies.

``guaranteed_no_evict`` starts a request only when all its blocks are free beside those that every running request will
still take, so nobody ever has to stop. ``max_utilization`` starts whoever fits in the next step, and pauses the last
started when somebody before it can't grow. ``static_batch`` starts a new batch when the old one is finished.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onebudget.core import RequestState
from onebudget.errors import ConfigError
from onebudget.units import align_up, ceil_div

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.scheduling.cache import SchedulableCache

NO_LIMIT = sys.maxsize
Pause = Callable[["Request"], None]


class CapacityPolicy(ABC):
    """Asked in this order each step: ``generation``, then ``room`` and ``charge`` per running context, then ``admits``
    per waiting request. ``started`` and ``left`` follow the requests that hold something."""

    pauses = False

    def __init__(self, kv: SchedulableCache) -> None:
        self._kv = kv

    @abstractmethod
    def generation(self, running: Sequence[Request], pause: Pause) -> list[Request]:
        """The generating requests that run in this step, in order; ``pause`` takes a request out of ``running``."""

    def room(self, request: Request, position: int) -> int:
        """Context tokens from ``position`` on that this running request has blocks for."""
        return NO_LIMIT

    def charge(self, request: Request, position: int, tokens: int) -> None:
        """The running request computes ``tokens`` from ``position`` on in this step."""

    @abstractmethod
    def may_start(self, request: Request) -> bool:
        """Whether this waiting request can hold blocks at all now; cheap, because a blocked one is asked each step."""

    def admits(self, request: Request, cached: int, tokens: int) -> bool:
        """Whether its first chunk, behind ``cached`` tokens, runs in this step; yes charges it."""
        return True

    def resumes(self, request: Request) -> bool:
        """Whether a suspended request may come back to the device in this step."""
        return True

    def started(self, request: Request) -> None: ...

    def left(self, request: Request) -> None: ...


def _generating(running: Sequence[Request]) -> list[Request]:
    return [request for request in running if request.state is RequestState.GENERATION]


class GuaranteedNoEvict(CapacityPolicy):
    def __init__(self, kv: SchedulableCache) -> None:
        super().__init__(kv)
        self._reserved: dict[int, int] = {}
        self._reserved_blocks = 0
        self._left = 0

    def generation(self, running: Sequence[Request], pause: Pause) -> list[Request]:
        self._left = self._kv.max_resource_count() - self._reserved_blocks
        return _generating(running)

    def may_start(self, request: Request) -> bool:
        return self._kv.needed_to_completion(request) <= self._left

    def admits(self, request: Request, cached: int, tokens: int) -> bool:
        self._left -= self._kv.needed_to_completion(request)
        return self._left >= 0

    def started(self, request: Request) -> None:
        self._reserved[request.id] = needed = self._kv.needed_to_completion(request)
        self._reserved_blocks += needed

    def left(self, request: Request) -> None:
        self._reserved_blocks -= self._reserved.pop(request.id, 0)


class StaticBatch(GuaranteedNoEvict):
    def __init__(self, kv: SchedulableCache) -> None:
        super().__init__(kv)
        self._open = True

    def generation(self, running: Sequence[Request], pause: Pause) -> list[Request]:
        self._open = not running
        return super().generation(running, pause)

    def may_start(self, request: Request) -> bool:
        return self._open and super().may_start(request)


class MaxUtilization(CapacityPolicy):
    """``lookahead_steps``: steps whose growth must fit (2 under pipeline parallelism, where the next step is launched
    before this one is through). A suspended request comes back while no more than ``max_util_for_resume`` of the blocks
    would be used, or when it is alone."""

    pauses = True

    def __init__(self, kv: SchedulableCache, *, lookahead_steps: int = 1, max_util_for_resume: float = 1.0) -> None:
        super().__init__(kv)
        self._lookahead = lookahead_steps
        self._max_util = max_util_for_resume
        self._left = 0
        self._set_aside: dict[int, int] = {}
        self._paused = False
        self._alone = True

    def generation(self, running: Sequence[Request], pause: Pause) -> list[Request]:
        self._paused = False
        self._set_aside.clear()
        kept = [request for request in running if request.state <= RequestState.GENERATION]
        needs = [self._least(request) for request in kept]
        free = self._kv.free_blocks
        while kept and sum(needs) > free:
            if len(kept) == 1 and len(running) > 1:
                needs[0] = 0  # others end in this step and leave it their blocks
                kept = []
                break
            pause(kept.pop())
            needs.pop()
            self._paused = True
            free = self._kv.free_blocks
        self._left = free - sum(needs)
        self._set_aside = {r.id: n for r, n in zip(kept, needs, strict=False) if r.state is RequestState.CONTEXT}
        self._alone = not running
        return _generating(kept)

    def _least(self, request: Request) -> int:
        """Blocks a running request must get to make progress in the coming steps."""
        position = request.computed_tokens
        if request.state is RequestState.GENERATION:
            return self._kv.growth(request, position + request.step_tokens + self._lookahead - 1)
        size = self._kv.tokens_per_block
        least = min(request.remaining_prompt_tokens, size - position % size)
        return self._blocks(request, position, least)

    def _blocks(self, request: Request, position: int, tokens: int) -> int:
        """Blocks to take for ``tokens`` from ``position`` on. Those of a prefix that nobody holds count as free until
        the request begins."""
        return self._kv.growth(request, position + tokens + self._lookahead - 1)

    def room(self, request: Request, position: int) -> int:
        size = self._kv.tokens_per_block
        self._left += self._set_aside.pop(request.id, 0)
        held_tokens = align_up(position, size) if request.begun else 0
        return max(0, held_tokens + self._left * size - position - self._lookahead + 1)

    def charge(self, request: Request, position: int, tokens: int) -> None:
        self._left -= self._blocks(request, position, tokens)

    def may_start(self, request: Request) -> bool:
        return not self._paused and self._left > 0

    def admits(self, request: Request, cached: int, tokens: int) -> bool:
        self._left -= self._blocks(request, cached, tokens)
        return self._left >= 0

    def resumes(self, request: Request) -> bool:
        """It needs the blocks it held when it was suspended, and those of the coming step."""
        size = self._kv.tokens_per_block
        needed = ceil_div(request.computed_tokens + max(1, request.step_tokens) + self._lookahead - 1, size)
        if self._paused or needed > self._left:
            return False
        total = self._kv.max_resource_count()
        used = total - self._left + needed
        if used > total * self._max_util and not self._alone:
            return False
        self._left -= needed
        self._alone = False
        return True


POLICIES: dict[str, type[CapacityPolicy]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}


def make_policy(
    name: str, kv: SchedulableCache, *, pp_size: int = 1, max_util_for_resume: float = 1.0
) -> CapacityPolicy:
    """The policy of this name over ``kv``."""
    if name not in POLICIES:
        raise ConfigError.for_field("scheduler_policy", name, " or ".join(repr(known) for known in POLICIES))
    if name == "max_utilization":
        return MaxUtilization(kv, lookahead_steps=2 if pp_size > 1 else 1, max_util_for_resume=max_util_for_resume)
    return POLICIES[name](kv)


def scheduler_capacity(
    max_batch_size: int, *, pp_size: int = 1, is_v2: bool = False, attention_dp: bool = False, has_kv: bool = True
) -> int:
    """Requests that may run at once. A single one under attention data parallelism gets a second place, because the
    dummy that keeps an idle rank in step must not block real work."""
    capacity = max_batch_size if is_v2 else max_batch_size * pp_size
    return capacity + 1 if capacity == 1 and attention_dp and has_kv else capacity
