"""Pools of layers with different attention windows: shares, blocks, and what to do when a full request does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from onebudget.errors import BudgetError, ConfigError
from onebudget.knobs import RATIO_TOLERANCE
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig

WindowBytes = Mapping[int, int]
"""Attention window in tokens -> bytes per token of all layers with that window."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Blocks per window, the window lengths that can be served with them, and the longest request."""

    blocks: dict[int, int]
    windows: dict[int, int]
    max_seq_len: int
    warnings: tuple[str, ...] = ()


def pool_shares(pools: int, ratio: Sequence[float] | None = None) -> tuple[Fraction, ...]:
    """Share of the budget for each pool: the given ratio as exact decimals, or equal parts."""
    if ratio is None:
        return (Fraction(1, pools),) * pools
    shares = tuple(Fraction(str(share)) for share in ratio)
    if (
        len(shares) != pools
        or any(share <= 0 for share in shares)
        or abs(sum(shares, Fraction(0)) - 1) > RATIO_TOLERANCE
    ):
        allowed = f"{pools} positive numbers that sum to 1 (within 0.000001), one for each pool"
        raise ConfigError.for_field("pool_ratio", list(ratio), allowed)
    return shares


def shares_for_average(layers: WindowBytes, avg_seq_len: int, tokens_per_block: int) -> tuple[Fraction, ...]:
    """Shares in proportion to what a request of ``avg_seq_len`` tokens holds in each pool, in ascending window
    order."""
    held = [align_up(min(avg_seq_len, window), tokens_per_block) * layers[window] for window in sorted(layers)]
    return tuple(Fraction(each, sum(held)) for each in held)


def configured_shares(config: BudgetConfig, layers: WindowBytes) -> tuple[Fraction, ...]:
    """Shares as the settings want them: a pool ratio wins over an average length, and without both they are equal."""
    if config.pool_ratio is None and config.avg_seq_len is not None:
        return shares_for_average(layers, config.avg_seq_len, config.tokens_per_block)
    return pool_shares(len(layers), config.pool_ratio)


def window_blocks(
    budget_bytes: int, layers: WindowBytes, tokens_per_block: int, shares: Sequence[Fraction] | None = None
) -> dict[int, int]:
    """Blocks of each window's pool, in ascending order of windows; equal shares of the bytes unless others are given.

    A share is rounded down to whole tokens and then to whole blocks, so the pools never exceed the budget.
    """
    windows = sorted(layers)
    parts = shares or pool_shares(len(windows))
    return {
        window: int(share * budget_bytes / layers[window]) // tokens_per_block
        for window, share in zip(windows, parts, strict=True)
    }


def shrink_windows(budget_bytes: int, layers: WindowBytes) -> dict[int, int]:
    """Window lengths for which one full sequence fits ``budget_bytes``.

    Lengths grow from the shortest window on, paying for all layers that still grow at once; where a window can't be
    filled, all longer ones stop at the same length.
    """
    lengths: dict[int, int] = {}
    left, reached = budget_bytes, 0
    growing = sum(layers.values())
    for window in sorted(layers):
        step = min(left // growing, window - reached)
        left, reached = left - step * growing, reached + step
        growing -= layers[window]
        lengths[window] = reached
        if reached < window:
            return lengths | {longer: reached for longer in layers if longer > window}
    return lengths


def plan_windows(
    budget_bytes: int,
    layers: WindowBytes,
    *,
    tokens_per_block: int,
    max_seq_len: int,
    shares: Sequence[Fraction] | None = None,
) -> WindowPlan:
    """Blocks per window, with windows that exceed their pool clamped to it and ``max_seq_len`` to the longest of them.

    Raises ``BudgetError`` when a pool gets no block.
    """
    blocks = window_blocks(budget_bytes, layers, tokens_per_block, shares)
    empty = [window for window, count in blocks.items() if count == 0]
    if empty:
        raise BudgetError(
            f"The pool of attention window {empty[0]} gets no block of {tokens_per_block} tokens out of {budget_bytes} "
            "bytes. Raise free_gpu_memory_fraction or the cap, or give that window a larger part of pool_ratio."
        )
    usable = {window: min(window, count * tokens_per_block) for window, count in blocks.items()}
    clamped = [window for window in usable if usable[window] < min(window, max_seq_len)]
    warnings = [f"Attention window {each} is clamped to the {usable[each]} tokens its pool holds." for each in clamped]
    longest = max(usable.values())
    if not clamped or longest >= max_seq_len:
        return WindowPlan(blocks, usable, max_seq_len, tuple(warnings))
    warnings.append(f"max_seq_len is lowered from {max_seq_len} to {longest}, the longest window that fits.")
    return WindowPlan(blocks, usable, longest, tuple(warnings))
