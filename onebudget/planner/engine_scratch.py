"""Scratch of attention kernels that engines allocate at a fixed size and use as requests want it."""

from __future__ import annotations

from onebudget.units import ceil_div

FLOAT32_BYTES = 4
BLOCKS_PER_SM = 2
"""Thread blocks of a multiprocessor that FlashInfer plans for."""
DECODE_TILE_ROWS = 16


def split_attention_bytes(*, heads: int, padded_rows: int, head_dim: int, with_sums: bool = False) -> int:
    """Partial results of attention whose keys are split over several blocks: a 32-bit row of every head for every
    padded row, and with ``with_sums`` one more value each, the logarithm of its sum."""
    rows = heads * padded_rows
    return rows * head_dim * FLOAT32_BYTES + (rows * FLOAT32_BYTES if with_sums else 0)


def split_attention_rows(scratch_bytes: int, *, heads: int, head_dim: int) -> int:
    """Padded rows that a fixed scratch takes."""
    return scratch_bytes // (heads * head_dim * FLOAT32_BYTES)


def prefill_rows(*, multiprocessors: int, kv_heads: int, head_dim: int) -> int:
    """Most padded rows of a prefill: one tile for every block that runs at once, divided among the KV heads. More tiles
    than that are not split."""
    tile = 128 if head_dim < 256 else 64
    return max(BLOCKS_PER_SM * multiprocessors // kv_heads, 1) * tile


def recorded_rows(*, requests: int, heads_per_kv_head: int) -> int:
    """Padded rows of a recorded decode step: its tiles are laid out for every request it was recorded for."""
    return requests * ceil_div(heads_per_kv_head, DECODE_TILE_ROWS) * DECODE_TILE_ROWS
