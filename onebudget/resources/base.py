"""The contract of a resource manager: counts for the scheduler, hooks for the step, dummies for the profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.units import BlocksTotal


class ResourceKind(Enum):
    """What a manager keeps. The order here is not the order of the hooks."""

    KV = "kv"
    DRAFT_KV = "draft_kv"
    CROSS_KV = "cross_kv"
    PEFT = "peft"
    SEQ_SLOT = "seq_slot"
    SPEC = "spec"
    KV_COMPRESSION = "kv_compression"


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

    def kv_block_budget_applies(self) -> bool:
        """Whether ``request_kv_block_budget`` ever gives an answer; the same for all requests, known at start-up."""
        return False

    def request_kv_block_budget(self, request: Request) -> tuple[BlocksTotal, BlocksTotal] | None:
        """``(required, capacity)`` in device blocks, where the requirement is known exactly; None where it is not.

        A manager that overrides this overrides ``kv_block_budget_applies`` too.
        """
        return None

    def dummy_lengths(self) -> Sequence[Sequence[int]]:
        """Prompt lengths that exercise this manager: one list per batch the profile should run."""
        return ()

    def add_dummy_requests(self, ids: Sequence[int], **shape: Any) -> list[Request] | None:
        """Requests that hold capacity as real ones of this shape would; None, with nothing taken, where they can't."""
        return None

    def prepare(self, batch: ScheduledBatch) -> None:
        """Give every request of the batch what this step needs."""

    def update(self, batch: ScheduledBatch, attn_meta: object = None, kv_elem_bytes: int | None = None) -> None:
        """Settle after the step's tokens are known."""

    def free(self, request: Request) -> object:
        """Take back everything the request holds. The dispatcher has no use for an answer."""
        return None

    def shutdown(self) -> None:
        """Release what the manager itself holds."""
