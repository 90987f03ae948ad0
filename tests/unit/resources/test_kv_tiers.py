"""Evicted blocks below the device: the worked example of two tiers, files, and what goes wrong with them."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.devtools.kv_lives import MovingTier, WrittenStore, text_up_to
from onebudget.errors import StateError
from onebudget.resources.kv.disk_tier import DiskTier
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.spill import Spill
from onebudget.resources.kv.tier import CountedTier


def two_tiers(near_slots: int = 2, primary: int = 4) -> tuple[KVCacheManager, WrittenStore]:
    store = WrittenStore(primary, 4)
    group = KVGroup(store, near=MovingTier("host", near_slots, store))
    return KVCacheManager([group], reuse=True, partial_reuse=False, counters=group.blocks.counters), store


def request(number: int, tokens: list[int]) -> Request:
    return Request(number, tokens, SamplingParams(), max_new_tokens=1, state=RequestState.CONTEXT)


def compute(kv: KVCacheManager, store: WrittenStore, *requests: Request) -> None:
    """One step with the whole prompts."""
    batch = ScheduledBatch()
    for one in requests:
        one.chunk_tokens = one.prompt_tokens
        batch.add(one)
    kv.prepare(batch)
    for one in requests:
        table = kv.block_table(one)
        for position in range(one.computed_tokens, one.prompt_tokens):
            store.blocks[table[position // 4]][position % 4] = text_up_to(one, position)
        one.computed_tokens = one.prompt_tokens
        one.state = RequestState.GENERATION
        one.output_token_ids.append(99)
    kv.update(batch)


def spill_of(kv: KVCacheManager) -> Spill:
    spill = kv.groups[0].blocks.spill
    assert spill is not None
    return spill


def test_prefix_reuse_over_two_tiers() -> None:
    """Four blocks, two host slots. The third request claims what it shares with the first before it makes room, so it
    is the second one's blocks that leave."""
    kv, store = two_tiers()
    first = request(1, list(range(12)))
    compute(kv, store, first)
    assert kv.block_table(first) == [0, 1, 2]
    kv.free(first)
    assert (kv.free_blocks, kv.used_blocks) == (4, 0)

    second = request(2, [*range(8), *range(100, 108)])
    compute(kv, store, second)
    assert (kv.counters.reused, kv.counters.missed) == (0 + 2, 3 + 2)
    assert kv.block_table(second) == [0, 1, 3, 2]
    assert (kv.counters.evicted, kv.counters.offloaded, spill_of(kv).near.used_slots) == (1, 1, 1)
    kv.free(second)

    third = request(3, [*range(12), 50])
    compute(kv, store, third)
    assert (kv.counters.reused, kv.counters.missed) == (0 + 2 + 3, 3 + 2 + 1)
    assert kv.counters.onboarded == 1
    assert kv.block_table(third)[:2] == [0, 1]
    assert [store.blocks[block][3] for block in kv.block_table(third)[:3]] == [
        text_up_to(first, position) for position in (3, 7, 11)
    ]
    assert spill_of(kv).near.used_slots == 2
    assert kv.reusable_tokens(request(4, [*range(8), *range(100, 109)])) == 16
    kv.free(third)
    kv.reset_reuse()
    assert (kv.free_blocks, spill_of(kv).near.free_slots) == (4, 2)


def test_pinned_blocks_stay_until_they_are_unpinned() -> None:
    kv, store = two_tiers()
    first = request(1, list(range(12)))
    compute(kv, store, first)
    pins = kv.free(first, pin_on_release=True)
    assert (kv.free_blocks, kv.used_blocks) == (1, 3)
    assert kv.groups[0].blocks.evict(4) == 0
    for pin in pins:
        kv.unpin(pin)
    assert (kv.free_blocks, kv.used_blocks) == (4, 0)
    assert kv.reusable_tokens(request(2, [*range(12), 5])) == 12
    with pytest.raises(StateError, match="was released before"):
        kv.unpin(pins[0])


def test_claims_of_a_whole_batch_come_before_room_is_made() -> None:
    """Both requests of the step reuse; onboarding for one may not evict the other's prefix."""
    kv, store = two_tiers(near_slots=4, primary=6)
    texts = [list(range(start, start + 8)) for start in (0, 20, 40)]
    for number, tokens in enumerate(texts):
        one = request(number, tokens)
        compute(kv, store, one)
        kv.free(one)
    kv.groups[0].blocks.evict(2)  # the oldest text, to the host
    again = [request(10, [*texts[0], 1]), request(11, [*texts[1], 1])]
    compute(kv, store, *again)
    assert [len(kv.block_table(one)) for one in again] == [3, 3]
    assert kv.counters.reused == 4


def test_blocks_of_low_priority_are_dropped_instead_of_kept_below() -> None:
    store = WrittenStore(2, 4)
    group = KVGroup(store, near=CountedTier("host", 4))
    blocks = group.blocks
    root = blocks.tree.root()
    for number, priority in enumerate((0, 1)):
        blocks.hold(root)
        node = blocks.insert(root, bytes([number]) * 16, 0, blocks.take(1), 1, priority)
        blocks.release(node)
    assert blocks.evict(2) == 2
    assert blocks.counters.offloaded == 1
    assert blocks.spill is not None and blocks.spill.near.used_slots == 1


def test_lower_priority_goes_first_whatever_was_used_last() -> None:
    blocks = KVGroup(WrittenStore(3, 4)).blocks
    root = blocks.tree.root()
    for number, priority in enumerate((80, 35, 35)):
        blocks.hold(root)
        blocks.release(blocks.insert(root, bytes([number]) * 16, 0, blocks.take(1), 1, priority))
    assert [blocks.take(1), blocks.take(1), blocks.take(1)] == [[1], [2], [0]]


def disk(tmp_path: Path, slots: int = 4) -> DiskTier:
    return DiskTier(tmp_path / "tier", slots, 16)


def test_files_give_back_what_they_got_and_go_with_the_tier(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    assert tier.write(1, b"a" * 16)
    assert tier.write(2, memoryview(b"b" * 16))
    assert (tier.read(1), tier.read(2)) == (b"a" * 16, b"b" * 16)
    tier.discard([1])
    assert len(list(tier.folder.iterdir())) == 1
    tier.release()
    assert not tier.folder.exists()


@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "remove"])
def test_a_damaged_or_vanished_file_is_a_miss_with_one_warning(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk(tmp_path)
    for slot in range(3):
        tier.write(slot, bytes([slot]) * 16)
    for slot in range(2):
        path = tier.folder / f"{slot}.kv"
        content = path.read_bytes()
        if harm == "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif harm == "cut":
            path.write_bytes(content[:-1])
        elif harm == "swap":
            path.write_bytes((tier.folder / "2.kv").read_bytes())
        else:
            path.unlink()
    with caplog.at_level(logging.WARNING):
        assert [tier.read(slot) for slot in range(3)] == [None, None, bytes([2]) * 16]
    assert len(caplog.records) == 1
    assert "computed again" in caplog.text


def test_a_full_disk_ends_the_tier_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk(tmp_path)
    tier.write(0, b"a" * 16)

    class FullDisk:
        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "open", lambda path, mode: FullDisk())
        assert not tier.write(1, b"b" * 16)
        assert not tier.write(2, b"b" * 16)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert tier.read(0) == b"a" * 16


def test_a_tier_that_stopped_takes_no_more_and_still_gives() -> None:
    store = WrittenStore(4, 4)
    group = KVGroup(
        store, near=MovingTier("host", 1, store), far=MovingTier("disk", 8, store, in_memory=False, full_after=1)
    )
    kv = KVCacheManager([group], reuse=True, partial_reuse=False, counters=group.blocks.counters)
    for number in range(4):
        one = request(number, [number] * 4)
        compute(kv, store, one)
        kv.free(one)
    assert [kv.groups[0].blocks.evict(1) for _ in range(4)] == [1] * 4
    spill = spill_of(kv)
    assert spill.far is not None and spill.far.stopped
    assert (spill.near.used_slots, spill.far.used_slots) == (1, 1)
    assert [kv.reusable_tokens(request(9, [number] * 5)) for number in range(4)] == [4, 0, 0, 4]
    again = request(8, [0] * 5)
    compute(kv, store, again)
    assert store.blocks[kv.block_table(again)[0]][3] == text_up_to(again, 3)


def test_what_the_disk_lost_is_no_longer_found() -> None:
    store = WrittenStore(4, 4)
    group = KVGroup(store, near=MovingTier("disk", 8, store, in_memory=False))
    kv = KVCacheManager([group], reuse=True, partial_reuse=False, counters=group.blocks.counters)
    one = request(0, list(range(12)))
    compute(kv, store, one)
    kv.free(one)
    group.blocks.evict(3)
    store.lost = {1}
    again = request(1, [*range(12), 1])
    assert kv.reusable_tokens(again) == 12
    assert kv.begin(again) == 4
    assert kv.counters.disk_lost == 1
    assert kv.reusable_tokens(request(2, [*range(12), 1])) == 4
    assert spill_of(kv).near.used_slots == 0


def test_a_part_of_a_block_is_copied_and_not_at_the_cost_of_itself() -> None:
    store = WrittenStore(3, 4)
    kv = KVCacheManager(store, reuse=True)
    one = request(0, [0, 1, 2, 3])
    compute(kv, store, one)
    kv.free(one)
    other = request(1, [0, 1, 9, 9, 9])
    assert kv.begin(other) == 2
    assert (kv.counters.partial_copies, kv.counters.reused, kv.counters.reused_tokens) == (1, 0, 2)
    assert store.blocks[kv.block_table(other)[0]][1] == text_up_to(one, 1)
    kv.free(other)
    held = kv.groups[0].blocks.take(2)
    assert kv.free_blocks == 1
    last = request(2, [0, 1, 8, 8, 8])
    assert kv.begin(last) == 0
    assert (kv.block_table(last), kv.free_blocks) == ([], 1)
    kv.groups[0].blocks.give_back(held)
