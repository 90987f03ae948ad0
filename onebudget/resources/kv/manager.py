"""The paged KV cache manager: block tables per sequence over one pool of equal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onebudget.errors import CapacityError
from onebudget.resources.base import BaseResourceManager
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.kv.pool import KVPool


class KVCacheManager(BaseResourceManager):
    """Blocks are taken as tokens are computed; admission counts to completion, so taking never fails in service.

    ``probe_lengths`` are the prompt lengths of the profile's batches when this manager serves the profile.
    """

    def __init__(self, pool: KVPool, *, probe_lengths: Sequence[Sequence[int]] = ()) -> None:
        self.pool = pool
        self.tokens_per_block = pool.layout.tokens_per_block
        self._probe_lengths = probe_lengths
        self._free = list(range(pool.num_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self.peak_used_blocks = 0

    @property
    def allocated_bytes(self) -> int:
        """Device bytes of the pool."""
        return self.pool.allocated_bytes

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.pool.num_blocks - len(self._free)

    def max_resource_count(self) -> int:
        return self.pool.num_blocks

    def needed_to_completion(self, request: Request) -> int:
        return blocks_to_completion(request.prompt_tokens, request.max_new_tokens, self.tokens_per_block)

    def dummy_lengths(self) -> Sequence[Sequence[int]]:
        return self._probe_lengths

    def block_table(self, request: Request) -> list[int]:
        return self._tables[request.id]

    def prepare(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            self._grow(request, request.computed_tokens + len(request.tokens_of_step()))
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)

    def _grow(self, request: Request, tokens: int) -> None:
        table = self._tables.setdefault(request.id, [])
        missing = ceil_div(tokens, self.tokens_per_block) - len(table)
        if missing > len(self._free):
            raise CapacityError(
                f"request {request.id} needs {missing} more KV blocks for {tokens} tokens, {len(self._free)} of "
                f"{self.pool.num_blocks} are free",
                request_id=request.id,
                needed=missing,
                free=len(self._free),
            )
        table.extend(self._free.pop() for _ in range(missing))

    def free(self, request: Request) -> None:
        table = self._tables.pop(request.id, None)
        if table:
            self._free.extend(reversed(table))

    def shutdown(self) -> None:
        self._tables.clear()
        self.pool.release()


def blocks_to_completion(prompt_tokens: int, new_tokens: int, tokens_per_block: int) -> int:
    """Blocks of a sequence when its last token exists: whole prompt blocks, then the rest with the new tokens."""
    whole, rest = divmod(prompt_tokens, tokens_per_block)
    return whole + ceil_div(rest + new_tokens, tokens_per_block)
