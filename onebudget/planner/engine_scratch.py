"""Scratch of attention kernels that engines allocate at a fixed size and use as requests want it."""

from __future__ import annotations

FLOAT32_BYTES = 4


def split_attention_bytes(*, heads: int, padded_rows: int, head_dim: int, with_sums: bool = False) -> int:
    """Partial results of attention whose keys are split over several blocks: a 32-bit row of every head for every
    padded row, and with ``with_sums`` one more value each, the logarithm of its sum."""
    rows = heads * padded_rows
    return rows * head_dim * FLOAT32_BYTES + (rows * FLOAT32_BYTES if with_sums else 0)


def split_attention_rows(scratch_bytes: int, *, heads: int, head_dim: int) -> int:
    """Padded rows that a fixed scratch takes."""
    return scratch_bytes // (heads * head_dim * FLOAT32_BYTES)
