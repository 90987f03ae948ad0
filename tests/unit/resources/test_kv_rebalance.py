"""Blocks that move between the pools of one quota: when, how many, and that nothing is lost on the way."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams
from onebudget.devtools.kv_lives import Lives, MovingTier, WrittenStore
from onebudget.errors import AllocationError, DeviceError
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.moving import PoolSize, blocks_for_shares, resize_pools
from onebudget.resources.kv.rebalance import MIN_SAMPLES, PoolUse, Rebalancer, rebalancer, wanted_shares
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.v2 import KVCacheManagerV2

HALF = Fraction(1, 2)


@dataclass
class Card:
    """Memory that pools take their bytes from, and the most that was ever taken."""

    capacity_bytes: int = 10**9
    used_bytes: int = 0
    peak_bytes: int = 0

    def take(self, nbytes: int) -> None:
        if self.used_bytes + nbytes > self.capacity_bytes:
            raise AllocationError(nbytes, self.capacity_bytes - self.used_bytes)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


@dataclass(slots=True)
class CardStore(CountedStore):
    """A counted pool on a card. ``faults``: errors that growing raises, one a call."""

    card: Card = field(default_factory=Card)
    faults: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.card.take(self.allocated_bytes)

    def resize(self, num_blocks: int) -> None:
        if num_blocks > self.num_blocks and self.faults:
            raise self.faults.pop(0)
        self.card.take((num_blocks - self.num_blocks) * self.block_bytes)
        self.num_blocks = num_blocks


def two_pools(full: int = 10, windowed: int = 10, *, sizes: tuple[int, int] = (8, 8), window: int = 4) -> Any:
    """A manager over a pool that attends to all and one with a window, on a card they fill."""
    card = Card()
    stores = [CardStore(full, 4, sizes[0], card=card), CardStore(windowed, 4, sizes[1], card=card)]
    kv = KVCacheManagerV2([KVGroup(stores[0], layers=[0]), KVGroup(stores[1], layers=[1], window_tokens=window)])
    card.capacity_bytes = card.used_bytes
    return kv, stores, card


def request(number: int) -> Request:
    return Request(number, [1] * 40, SamplingParams(), max_new_tokens=8, state=RequestState.CONTEXT)


# -- when ---------------------------------------------------------------------------------------------------------


def used(samples: int, *held_bytes: int) -> PoolUse:
    use = PoolUse(len(held_bytes))
    for _ in range(samples):
        use.add(held_bytes)
    return use


def wanted(use: PoolUse, now_s: float = 0, last_s: float | None = None) -> tuple[Fraction, ...] | None:
    return wanted_shares(use, [100, 100], now_s=now_s, last_s=last_s)


def test_two_thousand_samples_tell_and_one_less_does_not() -> None:
    assert MIN_SAMPLES == 2000
    assert wanted(used(1999, 3, 1)) is None
    assert wanted(used(2000, 3, 1)) == (Fraction(3, 4), Fraction(1, 4))


def test_pools_rest_for_two_minutes() -> None:
    use = used(2000, 3, 1)
    assert wanted(use, now_s=1119, last_s=1000) is None
    assert wanted(use, now_s=1120, last_s=1000) is not None


def test_a_quarter_of_a_share_is_no_deviation_and_more_is() -> None:
    assert wanted(used(2000, 625, 375)) is None  # halves, used to 5/8 and 3/8
    assert wanted(used(2000, 626, 374)) == (Fraction(313, 500), Fraction(187, 500))
    small = [900, 100]
    assert wanted_shares(used(2000, 875, 125), small, now_s=0, last_s=None) is None
    assert wanted_shares(used(2000, 874, 126), small, now_s=0, last_s=None) is not None, "by the small pool's share"


def test_nothing_held_says_nothing() -> None:
    assert wanted(used(2000, 0, 0)) is None


def test_old_steps_fade() -> None:
    use = used(4000, 1000, 0)
    use.add([0, 1000])
    assert (use.samples, use.held_bytes) == (2001, [2_000_000, 1000])


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def hold(kv: KVCacheManagerV2, tokens: int = 40) -> Request:
    """A sequence of ``tokens``, of which the windowed pool keeps what the window still shows."""
    one = request(0)
    assert kv.resize(one, tokens)
    one.computed_tokens = tokens
    for group in kv.groups:
        group.return_front(group.sequences[one.id], tokens)
    return one


def test_every_tenth_step_looks() -> None:
    kv, stores, _ = two_pools()
    balance = Rebalancer(kv, longest_tokens=8, clock=Time())
    hold(kv)  # 10 of 10 blocks beside 1 of 10
    for _ in range(1999):
        balance.after_step()
    assert (stores[0].num_blocks, balance.moves) == (10, 0)
    balance.after_step()
    assert [store.num_blocks for store in stores] == [18, 2], "what a request of eight tokens needs there"

    balance = Rebalancer(kv, longest_tokens=8, clock=Time())
    balance._use = used(3000, 3, 1)  # 3/4 instead of 18/20
    for _ in range(9):
        balance.after_step()
    assert stores[0].num_blocks == 18
    balance.after_step()
    assert (stores[0].num_blocks, balance.moves) == (15, 1)


def test_after_a_move_samples_and_rest_start_anew() -> None:
    kv, stores, _ = two_pools()
    time = Time()
    balance = Rebalancer(kv, longest_tokens=8, clock=time)
    one = hold(kv)
    for _ in range(2000):
        balance.after_step()
    assert balance.moves == 1
    kv.free(one)
    hold(kv, 4)  # one block of each
    time.now_s = 119
    for _ in range(2000):
        balance.after_step()
    assert balance.moves == 1
    time.now_s = 120
    for _ in range(10):
        balance.after_step()
    assert ([store.num_blocks for store in stores], balance.moves) == ([10, 10], 2)


# -- how many -----------------------------------------------------------------------------------------------------


def test_shares_in_whole_blocks_to_the_byte() -> None:
    pools = [PoolSize(10, 8, 1, 1), PoolSize(10, 8, 1, 1)]
    assert blocks_for_shares([Fraction(3, 4), Fraction(1, 4)], pools, 160) == (15, 5)
    assert blocks_for_shares([Fraction(1), Fraction(0)], pools, 160) == (19, 1)
    assert blocks_for_shares([Fraction(1, 3), Fraction(2, 3)], pools, 160) == (7, 13), "20/3 is rounded up, 40/3 down"


def test_steps_are_whole_and_what_they_leave_over_goes_where_it_fits() -> None:
    coarse, fine = PoolSize(10, 8, 1, 4), PoolSize(10, 8, 1, 1)
    assert coarse.smallest == 2
    assert blocks_for_shares([HALF, HALF], [coarse, fine], 160) == (10, 10)
    assert blocks_for_shares([Fraction(3, 5), Fraction(2, 5)], [coarse, fine], 160) == (10, 10)
    assert blocks_for_shares([Fraction(7, 10), Fraction(3, 10)], [coarse, fine], 160) == (14, 6)


@given(
    pools=st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 50), st.integers(0, 200), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    weights=st.lists(st.integers(0, 100), min_size=4, max_size=4),
    unused=st.integers(0, 1000),
)
def test_the_quota_is_filled_up_to_less_than_a_step(
    pools: list[tuple[int, int, int, int]], weights: list[int], unused: int
) -> None:
    sizes = [PoolSize(blocks, nbytes, min(least, blocks), step) for blocks, nbytes, least, step in pools]
    weights = weights[: len(sizes)]
    shares = [Fraction(weight, sum(weights) or 1) for weight in weights]
    quota = sum(size.blocks * size.block_bytes for size in sizes) + unused
    blocks = blocks_for_shares(shares, sizes, quota)
    total = sum(count * size.block_bytes for count, size in zip(blocks, sizes, strict=True))
    assert total <= quota < total + min(size.step_bytes for size in sizes)
    for count, size in zip(blocks, sizes, strict=True):
        assert count >= size.least_blocks
        assert (count - size.blocks) % size.step_blocks == 0


# -- the act ------------------------------------------------------------------------------------------------------


def test_a_request_that_did_not_fit_fits_afterwards_and_one_block_more_does_not() -> None:
    kv, _, card = two_pools(10, 10, sizes=(8, 4))
    assert card.used_bytes == 120
    one = request(0)
    assert not kv.resize(one, 41)
    assert resize_pools(kv.groups, [13, 4])
    kv.pools_resized()
    assert (card.used_bytes, card.peak_bytes) == (120, 120)
    assert not kv.resize(one, 13 * 4 + 1), "a block more"
    assert not kv.resize(one, 52), "thirteen blocks in the pool of four, where a window has to pass"
    one.computed_tokens = 0
    for tokens in range(4, 53, 4):
        assert kv.resize(one, tokens)
        one.computed_tokens = tokens
    assert [group.used_blocks for group in kv.groups] == [13, 2]
    assert not kv.resize(one, 53)
    kv.free(one)
    assert [group.free_blocks for group in kv.groups] == [13, 4]


def test_what_lies_beyond_the_end_moves_below_it() -> None:
    store = WrittenStore(10, 4)
    group = KVGroup(store)
    kv = KVCacheManagerV2([group, KVGroup(WrittenStore(10, 4), window_tokens=100)])
    first, second = request(0), request(1)
    assert kv.resize(first, 16)
    assert kv.resize(second, 12)
    assert kv.block_table(second) == [4, 5, 6]
    for number, block in enumerate(kv.block_table(second)):
        store.blocks[block] = [(number,)] * 4
    kv.free(first)
    assert kv.least_blocks(group) == 3
    group.resize(5)
    table = kv.block_table(second)
    assert table[0] == 4 and sorted(table) == [*sorted(set(table) - {4}), 4] and max(table) < 5
    assert [store.blocks[block][0] for block in table] == [(0,), (1,), (2,)]
    assert (group.free_blocks, group.used_blocks) == (2, 3)
    assert group.blocks.take(2) and not group.free_blocks


def test_pinned_blocks_stay_where_they_are() -> None:
    kv, stores, _ = two_pools()
    first, second = request(0), request(1)
    assert kv.resize(first, 12)
    assert kv.resize(second, 8)
    pins = kv.free(second, pin_on_release=True)
    kv.free(first)
    assert [kv.least_blocks(group) for group in kv.groups] == [5, 5]
    balance = Rebalancer(kv, longest_tokens=4, clock=Time())
    balance._use = used(2000, 1, 0)
    for _ in range(10):
        balance.after_step()
    assert [store.num_blocks for store in stores] == [15, 5]
    for pin in pins:
        kv.unpin(pin)
    assert [group.free_blocks for group in kv.groups] == [15, 5]


@pytest.mark.parametrize("error", [AllocationError(8, 0), DeviceError("full", call="create")])
def test_a_pool_that_cannot_grow_leaves_all_as_they_were(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    kv, stores, card = two_pools()
    stores[0].faults.append(error)
    one = hold(kv, 20)
    with caplog.at_level(logging.WARNING):
        assert not resize_pools(kv.groups, [15, 5])
    assert "did not move" in caplog.text
    assert [store.num_blocks for store in stores] == [10, 10]
    assert (card.used_bytes, card.peak_bytes) == (160, 160)
    assert [group.used_blocks for group in kv.groups] == [5, 1]
    kv.free(one)
    assert [group.free_blocks for group in kv.groups] == [10, 10]


def test_memory_that_somebody_else_took_meanwhile_is_not_missed_twice(caplog: pytest.LogCaptureFixture) -> None:
    kv, stores, _ = two_pools()
    stores[0].faults.append(AllocationError(8, 0))
    stores[1].faults.append(AllocationError(8, 0))
    balance = Rebalancer(kv, longest_tokens=8, clock=Time())
    one = hold(kv)
    with caplog.at_level(logging.WARNING):
        for _ in range(2000):
            balance.after_step()
    assert "stays at 2 of 10 blocks" in caplog.text
    assert ([store.num_blocks for store in stores], balance.failed, balance.moves) == ([10, 2], 1, 0)
    assert [(group.free_blocks, group.blocks.num_blocks) for group in kv.groups] == [(0, 10), (1, 2)]
    kv.free(one)
    balance._use = used(2000, 1, 1)  # the quota is still what it was
    balance._last_s = None
    for _ in range(10):
        balance.after_step()
    assert [store.num_blocks for store in stores] == [10, 10]


def test_a_pool_that_served_any_batch_is_counted_once_it_shrank() -> None:
    kv = KVCacheManagerV2(
        [
            KVGroup(CountedStore(10, 4, 8), layers=[0]),
            KVGroup(CountedStore(10, 4, 8), layers=[1], window_tokens=4, serves_any_batch=True),
        ]
    )
    one = request(0)
    assert kv.resize(one, 8)
    assert kv.free_blocks == 8
    assert resize_pools(kv.groups, [17, 3])
    kv.pools_resized()
    assert (kv.free_blocks, kv.max_resource_count()) == (1, 17)
    assert resize_pools(kv.groups, [10, 10])
    kv.pools_resized()
    assert kv.free_blocks == 8


# -- ranks --------------------------------------------------------------------------------------------------------


class Rank:
    """One of two ranks; the other's answers are scripted."""

    def __init__(self, rank: int, others: list[Any]) -> None:
        self.rank = rank
        self.others = others
        self.said: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        other = self.others.pop(0)
        return [value, other] if self.rank == 0 else [other, value]

    def broadcast(self, value: Any) -> Any:
        self.said.append(value)
        return value if self.rank == 0 else self.others.pop(0)


def check(balance: Rebalancer) -> None:
    for _ in range(10):
        balance.after_step()


def test_rank_0_decides_and_all_enter_every_tenth_step() -> None:
    kv, stores, _ = two_pools()
    rank = Rank(1, [None, (15, 5), True])
    balance = Rebalancer(kv, longest_tokens=8, clock=Time(), peers=rank)
    check(balance)
    assert (rank.said, stores[0].num_blocks) == ([None], 10)
    check(balance)
    assert (rank.said, stores[0].num_blocks) == ([None, None, True], 15)

    kv, stores, _ = two_pools()
    rank = Rank(0, [True])
    balance = Rebalancer(kv, longest_tokens=8, clock=Time(), peers=rank)
    balance._use = used(2000, 3, 1)
    check(balance)
    assert (rank.said, stores[0].num_blocks) == ([(15, 5), True], 15)


def test_ranks_go_back_together_where_one_could_not_grow() -> None:
    kv, stores, _ = two_pools()
    balance = Rebalancer(kv, longest_tokens=8, clock=Time(), peers=Rank(1, [(15, 5), False, [10, 10]]))
    check(balance)
    assert ([store.num_blocks for store in stores], balance.failed) == ([10, 10], 1)
    kv, stores, _ = two_pools()
    balance = Rebalancer(kv, longest_tokens=8, clock=Time(), peers=Rank(1, [(15, 5), False, [10, 5]]))
    check(balance)
    assert [store.num_blocks for store in stores] == [10, 5], "what the other lost for good"


def test_ranks_with_requests_of_their_own_move_when_one_has_to() -> None:
    kv, stores, _ = two_pools()
    rank = Rank(0, [False, True, True])
    balance = Rebalancer(kv, longest_tokens=8, clock=Time(), peers=rank, apart=True)
    check(balance)
    assert (rank.said, stores[0].num_blocks) == ([False], 10)
    check(balance)
    assert stores[0].num_blocks == 10, "too few samples of its own"
    balance._use = used(2000, 11, 9)
    check(balance)
    assert (rank.said, [store.num_blocks for store in stores]) == ([False, False, False], [11, 9])


# -- who has one --------------------------------------------------------------------------------------------------


def test_off_by_default_and_where_there_is_nothing_to_move() -> None:
    kv, _, _ = two_pools()
    on = BudgetConfig(kv_cache_manager="v2", kv_pool_rebalance=True)
    assert rebalancer(kv, BudgetConfig(kv_cache_manager="v2")) is None
    assert rebalancer(kv, on.replace(kv_pool_rebalance=False)) is None
    assert rebalancer(kv, on) is not None
    assert rebalancer(KVCacheManagerV2(CountedStore(10, 4, 8)), on) is None
    assert rebalancer(KVCacheManager(kv.groups), on) is None
    kv.groups[1].store.step_blocks = 0
    assert rebalancer(kv, on) is None


# -- lives --------------------------------------------------------------------------------------------------------

MOVES = (*("start", "step", "step", "step") * 2, "cancel", "pause_one", "unpin", "suspend_one", "resume_one", "resize")


@settings(deadline=None)
@given(
    size=st.integers(1, 4),
    bytes_of=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    near=st.integers(0, 10),
    seed=st.integers(0, 2**32),
    moves=st.lists(st.sampled_from(MOVES), min_size=20, max_size=80),
)
def test_no_block_in_use_is_lost_over_random_lives(
    size: int, bytes_of: tuple[int, int], near: int, seed: int, moves: list[str]
) -> None:
    """What a sequence reads is what was written for it, however often its blocks moved; the quota stays full."""
    stores = [WrittenStore(20, size, bytes_of[0]), WrittenStore(30, size, bytes_of[1])]
    tiers = [MovingTier("host", near, store) if near else None for store in stores]
    kv = KVCacheManagerV2(
        [KVGroup(stores[0], layers=[0], near=tiers[0]), KVGroup(stores[1], layers=[1], window_tokens=5, near=tiers[1])]
    )
    quota = kv.allocated_bytes
    balance = Rebalancer(kv, longest_tokens=12, clock=Time())
    lives = Lives(kv, seed=seed, max_prompt=10)
    for move in moves:
        if move == "resize":
            balance._use = used(1, lives.random.randrange(100), lives.random.randrange(1, 100))
            balance._use.samples, balance._last_s = 2000, None
            held = [group.used_blocks for group in kv.groups]
            check(balance)
            assert [group.used_blocks for group in kv.groups] == held
            assert quota - min(bytes_of) < kv.allocated_bytes <= quota
        else:
            getattr(lives, move)()
        lives.check()
    lives.finish()
    assert [group.free_blocks for group in kv.groups] == [store.num_blocks for store in stores]
