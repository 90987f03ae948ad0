"""The contract of a resource manager: counts for the scheduler, hooks for the step, dummies for the profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch


class ResourceKind(Enum):
    """What a manager keeps. The order here is not the order of the hooks."""

    KV = "kv"
    SEQ_SLOT = "seq_slot"


class BaseResourceManager(ABC):
    """Owns capacity and lifetime of one resource; never asks a device for memory at run time.

    Both counts are in the same unit and include what the request already holds. Hooks default to nothing.
    ``free`` must accept a request twice and one it never saw.
    """

    @abstractmethod
    def max_resource_count(self) -> int:
        """How many units exist; 0 means "do not gate on me"."""

    @abstractmethod
    def needed_to_completion(self, request: Request) -> int:
        """Units the request holds when its last token is computed."""

    def dummy_lengths(self) -> Sequence[Sequence[int]]:
        """Prompt lengths that exercise this manager: one list per batch the profile should run."""
        return ()

    def prepare(self, batch: ScheduledBatch) -> None:
        """Give every request of the batch what this step needs."""

    def update(self, batch: ScheduledBatch) -> None:
        """Settle after the step's tokens are known."""

    def free(self, request: Request) -> None:
        """Take back everything the request holds."""

    def shutdown(self) -> None:
        """Release what the manager itself holds."""
