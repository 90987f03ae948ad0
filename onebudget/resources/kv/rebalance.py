"""Whether the pools of one quota are used so unevenly that blocks should move between them, and when.

Every step counts what sequences hold in each pool. Their mean use over many steps says which share of the quota each
pool should have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol, TypeVar

from onebudget.resources.kv.moving import PoolSize, blocks_for_shares, resize_pools, restore_pools
from onebudget.resources.kv.v2 import KVCacheManagerV2

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.resources.kv.group import KVGroup
    from onebudget.resources.kv.manager import KVCacheManager

logger = logging.getLogger(__name__)

MIN_SAMPLES = 2000
COOLDOWN_SECONDS = 120
MAX_DEVIATION = Fraction(1, 4)
CHECK_EVERY_STEPS = 10

T = TypeVar("T")


class Peers(Protocol):
    """Ranks that decide together."""

    def gather(self, value: T) -> list[T]: ...

    def broadcast(self, value: T) -> T: ...


class _Alone:
    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value


class PoolUse:
    """Bytes that sequences held in each pool, summed over steps; old steps count half once there are twice as many as
    it takes."""

    def __init__(self, pools: int) -> None:
        self.samples = 0
        self.held_bytes = [0] * pools

    def add(self, held_bytes: Sequence[int]) -> None:
        if self.samples == 2 * MIN_SAMPLES:
            self.samples //= 2
            self.held_bytes = [nbytes // 2 for nbytes in self.held_bytes]
        self.samples += 1
        self.held_bytes = [total + nbytes for total, nbytes in zip(self.held_bytes, held_bytes, strict=True)]

    def shares(self) -> tuple[Fraction, ...] | None:
        """Each pool's part of all that was held; None while too few steps tell, and where nothing was held."""
        total = sum(self.held_bytes)
        if self.samples < MIN_SAMPLES or not total:
            return None
        return tuple(Fraction(nbytes, total) for nbytes in self.held_bytes)


def wanted_shares(
    use: PoolUse, pool_bytes: Sequence[int], *, now_s: float, last_s: float | None
) -> tuple[Fraction, ...] | None:
    """Shares that the pools should have; None where they may stay as they are.

    ``last_s``: when they were changed last. A pool may be used by up to a quarter of its share more or less than that.
    """
    shares = use.shares()
    if shares is None or (last_s is not None and now_s - last_s < COOLDOWN_SECONDS):
        return None
    total = sum(pool_bytes)
    has = [Fraction(nbytes, total) for nbytes in pool_bytes]
    uneven = any(abs(share - have) > have * MAX_DEVIATION for share, have in zip(shares, has, strict=True))
    return shares if uneven else None


class Rebalancer:
    """Moves blocks between the pools of ``kv``, between steps.

    No pool shrinks below what it needs for one request of ``longest_tokens``, nor below what is in use. Rank 0 decides
    for all ``peers``, which hold the same blocks; with ``apart`` each rank's cache is its own, and all move when one of
    them has to.
    """

    def __init__(
        self,
        kv: KVCacheManagerV2,
        *,
        longest_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
        apart: bool = False,
    ) -> None:
        self._kv = kv
        self._longest_tokens = longest_tokens
        self._clock = clock
        self._peers = peers or _Alone()
        self._apart = apart
        self._quota_bytes = kv.allocated_bytes
        self._use = PoolUse(len(kv.groups))
        self._steps = 0
        self._last_s: float | None = None
        self.moves = 0
        self.failed = 0

    def after_step(self) -> None:
        """Called by all ranks after each step, whatever was in it."""
        self._use.add([group.used_blocks * group.store.block_bytes for group in self._kv.groups])
        self._steps += 1
        if self._steps % CHECK_EVERY_STEPS == 0:
            self._check()

    def _check(self) -> None:
        groups = self._kv.groups
        pool_bytes = [group.store.allocated_bytes for group in groups]
        shares = wanted_shares(self._use, pool_bytes, now_s=self._clock(), last_s=self._last_s)
        blocks = self._agreed(shares)
        if blocks is None:
            return
        self._use = PoolUse(len(groups))
        self._last_s = self._clock()
        before = [group.num_blocks for group in groups]
        if list(blocks) == before:
            return
        if self._moved(before, blocks):
            self.moves += 1
            logger.info("blocks of the KV pools: %s -> %s", before, list(blocks))
        else:
            self.failed += 1
        self._kv.pools_resized()

    def _agreed(self, shares: tuple[Fraction, ...] | None) -> tuple[int, ...] | None:
        """The blocks of each pool to go to on this rank; None: nobody moves."""
        if self._apart:
            if not any(self._peers.gather(shares is not None)):
                return None
            shares = shares or self._use.shares()
            return tuple(group.num_blocks for group in self._kv.groups) if shares is None else self._blocks(shares)
        return self._peers.broadcast(None if shares is None else self._blocks(shares))

    def _blocks(self, shares: tuple[Fraction, ...]) -> tuple[int, ...]:
        return blocks_for_shares(shares, [self._size(group) for group in self._kv.groups], self._quota_bytes)

    def _size(self, group: KVGroup) -> PoolSize:
        beside = group.num_blocks - group.capacity
        least = max(group.blocks_at_end(self._longest_tokens) + beside, self._kv.least_blocks(group))
        return PoolSize(
            group.num_blocks, group.store.block_bytes, min(least, group.num_blocks), group.store.step_blocks
        )

    def _moved(self, before: Sequence[int], blocks: Sequence[int]) -> bool:
        """Whether all ranks that have to could move. Where one could not, all are as before, or alike."""
        groups = self._kv.groups
        moved = resize_pools(groups, blocks)
        if self._apart or all(self._peers.gather(moved)):
            return moved
        if moved:
            restore_pools(groups, before)
        every = self._peers.gather([group.num_blocks for group in groups])
        restore_pools(groups, [min(counts) for counts in zip(*every, strict=True)])
        return False


def rebalancer(
    kv: KVCacheManager,
    config: BudgetConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    peers: Peers | None = None,
    apart: bool = False,
) -> Rebalancer | None:
    """None where the knob is off, or the cache has no two pools that change their size."""
    if not config.kv_pool_rebalance or not isinstance(kv, KVCacheManagerV2) or len(kv.groups) < 2:
        return None
    if not all(group.store.step_blocks for group in kv.groups):
        return None
    return Rebalancer(kv, longest_tokens=config.max_seq_len + 1, clock=clock, peers=peers, apart=apart)
