"""How many context tokens a request computes in a step: in order of arrival, or equal progress for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from onebudget.units import align_down

ChunkPolicy = Literal["first_come_first_served", "equal_progress"]
LEAST_WINDOW_UNIT = 256
"""Chunks of models with sliding windows end on multiples of at least this."""


def chunk_unit(tokens_per_block: int, *, sliding_windows: bool) -> int:
    """Tokens that a chunk's end is aligned to, unless it is the last."""
    return max(tokens_per_block, LEAST_WINDOW_UNIT) if sliding_windows else tokens_per_block


def next_chunk(
    position: int, context_tokens: int, tokens_left: int, *, unit: int, chunked: bool, is_first: bool
) -> int:
    """Tokens to compute from ``position`` on with ``tokens_left`` in the step; 0 means the request waits.

    A chunk that is not the last ends on a multiple of ``unit``. Where not even one unit is left, the first context of a
    step takes what is left: steps smaller than a unit must not stop a prompt for ever.
    """
    remaining = max(1, context_tokens - position)
    if remaining <= tokens_left:
        return remaining
    if not chunked or tokens_left <= 0:
        return 0
    aligned = align_down(position + tokens_left, unit) - position
    return aligned if aligned > 0 else tokens_left if is_first else 0


def equal_chunks(remaining: Sequence[int], tokens_left: int, unit: int) -> list[int]:
    """One unit after the other to each request in turn, until the tokens or the requests are used up."""
    chunks = [0] * len(remaining)
    while tokens_left > 0:
        before = tokens_left
        for index, wanted in enumerate(remaining):
            share = min(unit, wanted - chunks[index], tokens_left)
            if share < min(unit, wanted - chunks[index]) and chunks[index]:
                continue  # a piece of a unit would leave the chunk's end unaligned
            chunks[index] += share
            tokens_left -= share
        if tokens_left == before:
            break
    return chunks
