"""The paged KV cache manager: block tables per sequence over one pool of equal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onebudget.errors import CapacityError
from onebudget.resources.base import BaseResourceManager
from onebudget.resources.kv.blocks import BlockPool
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.kv.pool import KVPool


class KVCacheManager(BaseResourceManager):
    """Blocks are taken as tokens are computed; admission counts to completion, so taking never fails in service.

    With ``reuse`` the full blocks of a sequence stay readable after it, and a later request that starts with the same
    tokens begins behind them. Dummies neither reuse nor are reused. ``probe_lengths`` are the prompt lengths of the
    profile's batches when this manager serves the profile. ``attended_tokens_cap``: cached and computed prompt tokens
    that the prompts of one step may attend to together; None is no cap, 0 lets one prompt in.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        reuse: bool = False,
        probe_lengths: Sequence[Sequence[int]] = (),
        attended_tokens_cap: int | None = None,
    ) -> None:
        self.pool = pool
        self.tokens_per_block = pool.layout.tokens_per_block
        self._probe_lengths = probe_lengths
        self.attended_tokens_cap = attended_tokens_cap
        self.blocks = BlockPool(pool.num_blocks)
        self._reuse = reuse
        self._tables: dict[int, list[int]] = {}
        self.peak_used_blocks = 0

    @property
    def allocated_bytes(self) -> int:
        """Device bytes of the pool."""
        return self.pool.allocated_bytes

    @property
    def free_blocks(self) -> int:
        return self.blocks.free_blocks

    @property
    def used_blocks(self) -> int:
        return self.blocks.used_blocks

    def max_resource_count(self) -> int:
        return self.pool.num_blocks

    def needed_to_completion(self, request: Request) -> int:
        if request.pretended_tokens:
            return 1
        return blocks_to_completion(request.prompt_tokens, request.max_new_tokens, self.tokens_per_block)

    def dummy_lengths(self) -> Sequence[Sequence[int]]:
        return self._probe_lengths

    def block_table(self, request: Request) -> list[int]:
        return self._tables[request.id]

    def begin(self, request: Request) -> int:
        """Hold the kept blocks this request starts with; returns their tokens, which need no computing.

        At least the last prompt token is left, because its logits are wanted.
        """
        if request.pretended_tokens:
            return self._pretend(request)
        table = self.blocks.claim_prefix(self._reusable(request), self.tokens_per_block)
        self._tables[request.id] = table
        return len(table) * self.tokens_per_block

    def _pretend(self, request: Request) -> int:
        """A dummy behind a full cache: one block stands for all of its table."""
        block = self.blocks.take()
        self.pool.clear_fresh([block])
        self._tables[request.id] = [block] * ceil_div(request.pretended_tokens, self.tokens_per_block)
        return request.pretended_tokens

    def reusable_tokens(self, request: Request) -> int:
        """What ``begin`` would return now; nothing is held."""
        if request.pretended_tokens:
            return request.pretended_tokens
        return len(self.blocks.find_prefix(self._reusable(request), self.tokens_per_block)) * self.tokens_per_block

    def _reusable(self, request: Request) -> Sequence[int]:
        """Log-probabilities of a prompt need all of it computed."""
        if not self._reuse or request.is_dummy or request.params.prompt_logprobs is not None:
            return ()
        return request.prompt_token_ids[: request.prompt_tokens - 1]

    def prepare(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            self._grow(request, request.computed_tokens + len(request.tokens_of_step()))
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)

    def _grow(self, request: Request, tokens: int) -> None:
        table = self._tables.setdefault(request.id, [])
        missing = ceil_div(tokens, self.tokens_per_block) - len(table)
        if request.pretended_tokens:
            table.extend(table[:1] * missing)
            return
        if missing > self.free_blocks:
            raise CapacityError(
                f"request {request.id} needs {missing} more KV blocks for {tokens} tokens, {self.free_blocks} of "
                f"{self.pool.num_blocks} are free",
                request_id=request.id,
                needed=missing,
                free=self.free_blocks,
            )
        taken = [self.blocks.take() for _ in range(missing)]
        self.pool.clear_fresh(taken)
        table.extend(taken)

    def update(self, batch: ScheduledBatch, attn_meta: object = None, kv_elem_bytes: int | None = None) -> None:
        for request in batch.context_last:
            self._store(request)

    def free(self, request: Request) -> None:
        self._store(request)
        table = self._tables.pop(request.id, [])
        self.blocks.give_back(table[:1] if request.pretended_tokens else table)

    def _store(self, request: Request) -> None:
        """Keep what stands in the cache by now; a finished sequence's own tokens too."""
        table = self._tables.get(request.id)
        if table and self._reuse and not request.is_dummy:
            tokens = [*request.prompt_token_ids, *request.output_token_ids][: request.computed_tokens]
            self.blocks.store(table, tokens, self.tokens_per_block)

    def reset_reuse(self) -> None:
        """Forget every kept prefix, because the pool's contents are gone."""
        self.blocks.reset_reuse()
        self.pool.forget_contents()

    def shutdown(self) -> None:
        self._tables.clear()
        self.pool.release()


def blocks_to_completion(prompt_tokens: int, new_tokens: int, tokens_per_block: int) -> int:
    """Blocks of a sequence when its last token exists: whole prompt blocks, then the rest with the new tokens."""
    whole, rest = divmod(prompt_tokens, tokens_per_block)
    return whole + ceil_div(rest + new_tokens, tokens_per_block)
