"""Sequence slots: a small integer per running request, for everything that is indexed by request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import NoFreeSlotsError
from onebudget.resources.base import BaseResourceManager

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch


class SequenceSlotManager(BaseResourceManager):
    """``max_sequences`` slots, given when a request first enters a batch and returned on ``free``."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._free = list(range(max_sequences - 1, -1, -1))
        self._slots: dict[int, int] = {}

    def max_resource_count(self) -> int:
        return self._max_sequences

    def needed_to_completion(self, request: Request) -> int:
        return 1

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def slot_of(self, request: Request) -> int:
        return self._slots[request.id]

    def prepare(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            if request.id not in self._slots:
                self._slots[request.id] = self._take(request)

    def _take(self, request: Request) -> int:
        if not self._free:
            raise NoFreeSlotsError(
                f"request {request.id} needs a sequence slot and all {self._max_sequences} are taken",
                request_id=request.id,
                needed=1,
            )
        return self._free.pop()

    def free(self, request: Request) -> None:
        slot = self._slots.pop(request.id, None)
        if slot is not None:
            self._free.append(slot)
