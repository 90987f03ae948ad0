"""Scheduling by the cache of one rank of a helix group, which is given blocks for its own tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.scheduling.capacity import MaxUtilization
from onebudget.scheduling.scheduler import Scheduler
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.core import Request
    from onebudget.resources.kv.helix import HelixRank
    from onebudget.scheduling.cache import SchedulableCache


class HelixUtilization(MaxUtilization):
    """A context also goes on through tokens that other ranks keep when this one has no block left."""

    def __init__(self, kv: SchedulableCache, helix: HelixRank, *, max_util_for_resume: float = 1.0) -> None:
        super().__init__(kv, max_util_for_resume=max_util_for_resume)
        self._helix = helix

    def room(self, request: Request, position: int) -> int:
        size = self._kv.tokens_per_block
        self._left += self._set_aside.pop(request.id, 0)
        held = ceil_div(self._helix.local_tokens(request, position, size), size) if request.begun else 0
        return max(0, self._helix.reach(request, (held + self._left) * size, size) - position)


class HelixScheduler(Scheduler):
    """The scheduler over the v2 cache of rank ``helix``. On rank 0 its batches fit on every rank."""

    def __init__(self, config: BudgetConfig, kv: SchedulableCache, helix: HelixRank) -> None:
        super().__init__(config, kv)
        self._policy = HelixUtilization(kv, helix, max_util_for_resume=config.max_util_for_resume)
