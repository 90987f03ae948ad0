"""The KV cache of cross-attention: what a decoder reads of its encoder's output."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from onebudget.errors import StateError
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.units import BlocksTotal
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.kv.group import KVGroup
    from onebudget.resources.kv.store import KVStore

logger = logging.getLogger(__name__)


class CrossKVCacheManager(KVCacheManager):
    """Blocks for the encoder's tokens, all taken with the first chunk, for one beam; they never grow, and nothing is
    reused: an encoder's output has no text to find it by."""

    def __init__(self, groups: KVStore | KVGroup) -> None:
        super().__init__(groups)

    def needed_to_completion(self, request: Request) -> BlocksTotal:
        if request.pretended_tokens or request.encoder_tokens is None:
            return BlocksTotal(0)
        return BlocksTotal(ceil_div(request.encoder_tokens, self.tokens_per_block))

    def kv_block_budget_applies(self) -> bool:
        return True

    def request_kv_block_budget(self, request: Request) -> tuple[BlocksTotal, BlocksTotal] | None:
        """None, with a warning, when the encoder's length is unknown."""
        if request.encoder_tokens is None:
            logger.warning("request %d has no encoder length: its cross-attention blocks are unknown", request.id)
            return None
        return self.needed_to_completion(request), self.groups[0].capacity

    def prepare(self, batch: ScheduledBatch) -> None:
        """``StateError`` for a request without an encoder length."""
        group = self.groups[0]
        for request in batch.context:
            if request.id in group.sequences:
                continue
            if request.encoder_tokens is None:
                raise StateError(f"request {request.id} reaches the decoder without the length of its encoder output")
            sequence = group.open(request.id)
            group.grow(sequence, request, request.encoder_tokens)
        group.note_peak()

    def update(self, batch: ScheduledBatch, attn_meta: object = None, kv_elem_bytes: int | None = None) -> None:
        """Nothing to settle."""
