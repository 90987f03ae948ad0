"""Random lives of requests: whatever is read was written for the same text, and in the end every pool is full."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebudget.devtools.kv_lives import Lives, MovingTier, WrittenStore
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.v2 import KVCacheManagerV2

MOVES = ("start", "start", "step", "step", "step", "step", "cancel", "pause_one", "unpin", "suspend_one", "resume_one")


def build(kind: str, blocks: int, size: int, *, near: int = 0, far: int = 0, full_after: int = 10**9) -> KVCacheManager:
    store = WrittenStore(blocks, size)
    tiers = [MovingTier("host", near, store)] if near else []
    if far:
        tiers.append(MovingTier("disk", far, store, in_memory=False, full_after=full_after))
    first, second, *_ = [*tiers, None, None]
    groups = [KVGroup(store, layers=[0], near=first, far=second)]
    if kind == "mixed":
        groups.append(KVGroup(WrittenStore(30, size), layers=[1], window_tokens=5, step_slack_blocks=10))
    make = KVCacheManagerV2 if kind == "v2" else KVCacheManager
    return make(groups, reuse=True, counters=groups[0].blocks.counters)


def run(lives: Lives, moves: list[str]) -> None:
    for move in moves:
        getattr(lives, move)()
        lives.check()
    lives.finish()
    assert all(group.used_blocks == 0 for group in lives.kv.groups)
    lives.kv.reset_reuse()
    for group in lives.kv.groups:
        assert group.free_blocks == group.num_blocks
        if group.blocks.spill is not None:
            assert group.blocks.spill.near.used_slots == 0


@settings(deadline=None)
@given(
    kind=st.sampled_from(["v1", "v2", "mixed"]),
    blocks=st.integers(6, 24),
    size=st.integers(1, 4),
    near=st.integers(0, 10),
    far=st.integers(0, 10),
    full_after=st.sampled_from([5, 10**9]),
    seed=st.integers(0, 2**32),
    moves=st.lists(st.sampled_from(MOVES), max_size=60),
)
def test_what_is_read_was_written_for_the_same_text(
    kind: str, blocks: int, size: int, near: int, far: int, full_after: int, seed: int, moves: list[str]
) -> None:
    kv = build(kind, blocks, size, near=near, far=far, full_after=full_after)
    run(Lives(kv, seed=seed, max_prompt=min(30, (blocks - 1) * size)), moves)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), moves=st.lists(st.sampled_from(MOVES), min_size=20, max_size=80))
def test_blocks_that_the_disk_lost_are_computed_again(seed: int, moves: list[str]) -> None:
    kv = build("v1", 8, 2, near=2, far=20)
    store = kv.groups[0].store
    assert isinstance(store, WrittenStore)
    store.lost = set(range(0, 20, 3))
    run(Lives(kv, seed=seed, max_prompt=12), moves)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["v1", "v2", "mixed"])
@pytest.mark.parametrize("near", [0, 20])
def test_a_thousand_requests_end_with_full_pools(kind: str, near: int) -> None:
    kv = build(kind, 60, 4, near=near, far=near)
    lives = Lives(kv, seed=near, max_prompt=60)
    while lives.started < 1000:
        move = lives.random.choice(MOVES) if len(lives.running) < 12 else lives.random.choice(MOVES[2:])
        getattr(lives, move)()
    run(lives, [])
    assert lives.kv.counters.reused > 100 or kind == "mixed"
