"""Cut context chunks when the batch turned out larger than the step's tokens.

Admission charges a first chunk with the reuse it expects. Less reuse means more tokens; instead of undoing
allocations, which other parts have recorded by then, computing is postponed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FitResult:
    """``trimmed`` tokens wait for the next step; ``excess`` could not be trimmed."""

    trimmed: int = 0
    excess: int = 0


_FITS = FitResult()


def context_tokens_of(request: Request) -> int:
    """Tokens of a context request in this step; a last chunk brings its drafts."""
    tokens = min(request.chunk_tokens, request.remaining_prompt_tokens)
    return tokens + len(request.draft_tokens) if request.is_last_chunk else tokens


def batch_tokens(batch: ScheduledBatch, beam_width: int = 1) -> int:
    """Tokens that the forward of this batch computes."""
    generation = sum([1 + len(request.draft_tokens) for request in batch.generation]) * beam_width
    return generation + sum([context_tokens_of(request) for request in batch.context])


def trimmed_chunk(position: int, chunk: int, need: int, tokens_per_block: int) -> int:
    """The chunk after shedding at least ``need`` tokens where that is possible: it ends on a block boundary, and at
    least the block it began in is finished."""
    least = tokens_per_block - position % tokens_per_block
    end = (position + chunk - need) // tokens_per_block * tokens_per_block
    return min(chunk, max(least, end - position))


def fit_token_budget(
    batch: ScheduledBatch, max_num_tokens: int, tokens_per_block: int, *, chunked: bool = True, beam_width: int = 1
) -> FitResult:
    """Trim context chunks until the batch has at most ``max_num_tokens`` tokens.

    Last chunks go first, because they carry the discount that was wrong. No request leaves the batch and no block is
    freed: votes between ranks and sets of requests in flight stay valid. Requests whose media tokens attend both ways,
    and those that only transfer KV, are left whole.
    """
    if batch.can_use_graph:
        return _FITS
    need = excess = batch_tokens(batch, beam_width) - max_num_tokens
    if excess <= 0:
        return _FITS
    if chunked:
        for request in reversed(batch.context):
            need -= _trim(request, need, tokens_per_block)
            if need <= 0:
                break
        batch.rebin()
    if need > 0:
        logger.warning(
            "a step has %d tokens and max_num_tokens is %d: %d could not be postponed%s",
            max_num_tokens + need,
            max_num_tokens,
            need,
            "" if chunked else ", because chunked prefill is off",
        )
    return FitResult(excess - need, max(0, need))


def _trim(request: Request, need: int, tokens_per_block: int) -> int:
    """Tokens shed from this request's chunk."""
    if request.media_digests:
        return 0
    before = context_tokens_of(request)
    current = min(request.chunk_tokens, request.remaining_prompt_tokens)
    chunk = trimmed_chunk(request.computed_tokens, current, need, tokens_per_block)
    if chunk >= current:
        return 0
    request.chunk_tokens = chunk
    return before - context_tokens_of(request)
