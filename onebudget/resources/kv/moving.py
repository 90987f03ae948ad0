"""Blocks that move between the pools of one quota: how many each pool gets, and the act."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from onebudget.errors import AllocationError, DeviceError, StateError

if TYPE_CHECKING:
    from onebudget.resources.kv.group import KVGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """``blocks`` of ``block_bytes``; the pool goes down to ``least_blocks``, by multiples of ``step_blocks``."""

    blocks: int
    block_bytes: int
    least_blocks: int
    step_blocks: int

    @property
    def smallest(self) -> int:
        """The fewest blocks, a whole number of steps from here."""
        return self.blocks - (self.blocks - self.least_blocks) // self.step_blocks * self.step_blocks

    @property
    def step_bytes(self) -> int:
        return self.step_blocks * self.block_bytes


def blocks_for_shares(shares: Sequence[Fraction], pools: Sequence[PoolSize], quota_bytes: int) -> tuple[int, ...]:
    """Blocks of each pool so that its bytes come to its share of the quota.

    A pool whose share is below its least size keeps that, and the others divide what is left. What whole steps leave
    over goes to pools that got less than their share; less than the smallest step stays unused.
    """
    ideal = _ideal_bytes(shares, pools, quota_bytes)
    blocks = [
        pool.smallest + int((wanted - pool.smallest * pool.block_bytes) // pool.step_bytes) * pool.step_blocks
        for pool, wanted in zip(pools, ideal, strict=True)
    ]
    left = quota_bytes - sum(count * pool.block_bytes for count, pool in zip(blocks, pools, strict=True))
    missing = [wanted - count * pool.block_bytes for wanted, count, pool in zip(ideal, blocks, pools, strict=True)]
    for number in sorted(range(len(pools)), key=lambda number: -missing[number]):
        steps = left // pools[number].step_bytes
        blocks[number] += steps * pools[number].step_blocks
        left -= steps * pools[number].step_bytes
    return tuple(blocks)


def _ideal_bytes(shares: Sequence[Fraction], pools: Sequence[PoolSize], quota_bytes: int) -> list[Fraction]:
    least = [pool.smallest * pool.block_bytes for pool in pools]
    ideal = [Fraction(nbytes) for nbytes in least]
    open_pools = set(range(len(pools)))
    while open_pools:
        left = quota_bytes - sum(least[number] for number in range(len(pools)) if number not in open_pools)
        weight = sum(shares[number] for number in open_pools)
        ideal_of = {number: left * shares[number] / weight if weight else Fraction(0) for number in open_pools}
        short = {number for number in open_pools if ideal_of[number] < least[number]}
        if not short:
            for number in open_pools:
                ideal[number] = ideal_of[number]
            break
        open_pools -= short
    return ideal


def resize_pools(groups: Sequence[KVGroup], blocks: Sequence[int]) -> bool:
    """Give each group's pool its ``blocks``: those that shrink first, so that the bytes never exceed what they were or
    become.

    False when memory for a larger pool isn't there; the pools are then as before, or smaller where what they had given
    up is gone.
    """
    before = [group.num_blocks for group in groups]
    try:
        _resize(groups, blocks)
    except (AllocationError, DeviceError, StateError) as error:
        logger.warning("blocks did not move between the pools of the KV cache: %s", error)
        restore_pools(groups, before)
        return False
    for group, count in zip(groups, before, strict=True):
        group.serves_any_batch = group.serves_any_batch and group.num_blocks >= count
    return True


def restore_pools(groups: Sequence[KVGroup], blocks: Sequence[int]) -> None:
    """Back to ``blocks``, as far as there is memory for it."""
    for grows in (False, True):
        for group, count in zip(groups, blocks, strict=True):
            try:
                _resize_one(group, count, grows=grows)
            except (AllocationError, DeviceError, StateError) as error:
                group.serves_any_batch = False
                logger.warning("a pool of the KV cache stays at %s of %s blocks: %s", group.num_blocks, count, error)


def _resize(groups: Sequence[KVGroup], blocks: Sequence[int]) -> None:
    for grows in (False, True):
        for group, count in zip(groups, blocks, strict=True):
            _resize_one(group, count, grows=grows)


def _resize_one(group: KVGroup, blocks: int, *, grows: bool) -> None:
    if blocks != group.num_blocks and (blocks > group.num_blocks) is grows:
        group.resize(blocks)
