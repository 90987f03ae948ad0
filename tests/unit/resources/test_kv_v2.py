from __future__ import annotations

import pytest

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.devtools.kv_lives import MovingTier, WrittenStore
from onebudget.errors import CapacityError, ConfigError, StateError
from onebudget.resources import KVCacheManager
from onebudget.resources.kv.cross import CrossKVCacheManager
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.v2 import KVCacheManagerV2


def manager(blocks: int = 20, near: int = 20, **settings: float) -> KVCacheManagerV2:
    store = WrittenStore(blocks, 4)
    group = KVGroup(store, near=MovingTier("host", near, store) if near else None)
    return KVCacheManagerV2([group], **settings)


def request(number: int, prompt: int, **facts: int) -> Request:
    return Request(number, [1] * prompt, SamplingParams(), max_new_tokens=8, state=RequestState.CONTEXT, **facts)


def started(kv: KVCacheManager, number: int, tokens: int) -> Request:
    one = request(number, tokens)
    assert kv.resize(one, tokens)
    one.computed_tokens = tokens
    return one


def test_resize_takes_blocks_at_once_and_nothing_where_they_do_not_suffice() -> None:
    kv = manager(4)
    one = request(0, 20)
    assert kv.resize(one, 9)
    assert (kv.used_blocks, len(kv.block_table(one))) == (3, 3)
    assert not kv.resize(one, 17)
    assert kv.used_blocks == 3
    assert kv.resize(one, 16)
    one.chunk_tokens = 16
    kv.prepare(ScheduledBatch(context_chunking=[one]))
    assert kv.used_blocks == 4
    kv.free(one)
    assert kv.free_blocks == 4


def test_a_suspended_sequence_gives_its_blocks_up_and_gets_its_contents_back() -> None:
    kv = manager()
    store = kv.groups[0].store
    assert isinstance(store, WrittenStore)
    one = started(kv, 0, 10)
    for index, block in enumerate(kv.block_table(one)):
        store.blocks[block][0] = (index,)
    assert kv.suspend(one)
    assert (kv.free_blocks, kv.is_suspended(one)) == (20, True)
    assert not kv.suspend(one)
    other = started(kv, 1, 8)
    for block in kv.block_table(other):
        store.blocks[block][0] = (99,)
    assert kv.resume(one)
    assert [store.blocks[block][0] for block in kv.block_table(one)] == [(0,), (1,), (2,)]
    assert not kv.resume(one)
    assert (kv.counters.suspended, kv.counters.resumed) == (1, 1)


def test_who_comes_back_leaves_room_to_grow() -> None:
    """Twenty blocks, at most 75 % in use: five beside eleven are too many, five beside ten are not."""
    kv = manager(max_util_for_resume=0.75)
    one = started(kv, 0, 19)
    assert kv.suspend(one)
    full, more = started(kv, 1, 40), started(kv, 2, 4)
    assert not kv.resume(one)
    kv.free(more)
    assert kv.resume(one)
    assert kv.used_blocks == 15
    kv.free(full)


def test_who_is_alone_comes_back_whatever_it_takes() -> None:
    kv = manager(5, max_util_for_resume=0.5)
    one = started(kv, 0, 18)
    assert kv.suspend(one)
    assert kv.resume(one)


def test_without_a_place_below_the_device_nobody_is_suspended() -> None:
    for kv in (manager(near=0), manager(near=2), KVCacheManager(CountedStore(20, 4))):
        one = started(kv, 0, 10)
        assert not kv.suspend(one)
        assert not kv.resume(one)
        assert kv.used_blocks == 3


def test_freeing_a_suspended_request_frees_its_slots() -> None:
    kv = manager()
    one = started(kv, 0, 10)
    kv.suspend(one)
    kv.free(one)
    spill = kv.groups[0].blocks.spill
    assert spill is not None
    assert spill.near.free_slots == 20
    assert not kv.resume(one)


def test_the_share_for_coming_back_is_checked() -> None:
    for wrong in (0, 1.1):
        with pytest.raises(ConfigError, match="max_util_for_resume"):
            manager(max_util_for_resume=wrong)


def test_cross_blocks_come_with_the_first_chunk_and_never_grow() -> None:
    kv = CrossKVCacheManager(CountedStore(10, 4))
    one = request(0, 8, encoder_tokens=9)
    one.chunk_tokens = 4
    for _ in range(2):
        kv.prepare(ScheduledBatch(context_chunking=[one]))
        assert (kv.used_blocks, kv.peak_used_blocks) == (3, 3)
        kv.update(ScheduledBatch(context_last=[one]))
    assert kv.needed_to_completion(one) == 3
    kv.free(one)
    kv.free(one)
    assert kv.free_blocks == 10


def test_a_decoder_needs_to_know_its_encoder() -> None:
    kv = CrossKVCacheManager(CountedStore(10, 4))
    with pytest.raises(StateError, match="request 0"):
        kv.prepare(ScheduledBatch(context_last=[request(0, 4)]))
    assert kv.free_blocks == 10


def test_dummies_hold_what_their_shape_holds() -> None:
    kv = KVCacheManager(CountedStore(10, 4))
    (plain,) = kv.add_dummy_requests([-1]) or []
    assert (plain.prompt_token_ids, kv.used_blocks) == ([1], 1)
    (drafting,) = kv.add_dummy_requests([-2], draft_tokens=4) or []
    assert (drafting.prompt_tokens, kv.used_blocks) == (5, 3)
    (helix,) = kv.add_dummy_requests([-3], helix=True) or []
    assert helix.prompt_tokens == 2
    (generating,) = kv.add_dummy_requests([-4], tokens=9, generation=True) or []
    assert (generating.prompt_tokens, generating.computed_tokens, generating.state) == (8, 8, RequestState.GENERATION)
    assert kv.used_blocks == 7
    kv.prepare(ScheduledBatch(context_last=[plain], generation=[generating]))
    assert kv.used_blocks == 7
    for dummy in (plain, drafting, helix, generating):
        kv.free(dummy)
    assert kv.free_blocks == 10


def test_dummies_that_do_not_fit_leave_nothing_behind_here_and_in_the_drafts_cache() -> None:
    kv, draft = KVCacheManager(CountedStore(4, 4)), KVCacheManager(CountedStore(2, 4))
    assert kv.add_dummy_requests([-1, -2, -3], tokens=8) is None
    assert kv.add_dummy_requests([-1, -2, -3], tokens=4, draft=draft) is None
    assert (kv.free_blocks, draft.free_blocks) == (4, 2)
    assert kv.add_dummy_requests([-1, -2], tokens=4, draft=draft) is not None
    assert (kv.free_blocks, draft.free_blocks) == (2, 0)
    assert draft.add_dummy_requests([-5]) is None


def test_a_dummy_that_can_not_be_removed_is_the_error_that_counts() -> None:
    class Stuck(KVCacheManager):
        def free(self, request: Request, pin_on_release: bool = False) -> list[int]:
            super().free(request, pin_on_release)
            if request.id == -1:
                raise RuntimeError("stuck")
            return []

    kv = Stuck(CountedStore(3, 4))
    with pytest.raises(RuntimeError, match="stuck"):
        kv.add_dummy_requests([-1, -2], tokens=8)
    assert kv.free_blocks == 3


def test_an_unknown_shape_of_dummy_is_refused() -> None:
    with pytest.raises(ConfigError, match="beams"):
        KVCacheManager(CountedStore(3, 4)).add_dummy_requests([-1], beams=2)


def test_room_for_drafts_is_kept_and_does_not_leak() -> None:
    kv = KVCacheManager(CountedStore(10, 4), draft_reserve_tokens=3, extra_kv_tokens=1)
    one = request(0, 8)
    one.chunk_tokens = 8
    kv.prepare(ScheduledBatch(context_last=[one]))
    assert len(kv.block_table(one)) == 3
    one.computed_tokens, one.state, one.output_token_ids = 8, RequestState.GENERATION, [1]
    for accepted in (0, 2, 1, 0):
        one.draft_tokens = [5, 5]
        batch = ScheduledBatch(generation=[one])
        kv.prepare(batch)
        assert len(kv.block_table(one)) == -(-(one.computed_tokens + 1 + 1 + 3) // 4)
        one.computed_tokens += 1 + accepted
        one.rewind_tokens = 2 - accepted
        kv.update(batch)
        assert len(kv.block_table(one)) <= -(-(one.computed_tokens + 1 + 1 + 3) // 4)


def test_a_long_draft_that_is_rejected_gives_its_blocks_back() -> None:
    kv = KVCacheManager(CountedStore(10, 4))
    one = request(0, 4)
    one.state, one.computed_tokens, one.output_token_ids, one.draft_tokens = RequestState.GENERATION, 4, [1], [5] * 9
    kv.resize(one, 4)
    kv.prepare(ScheduledBatch(generation=[one]))
    assert kv.used_blocks == 4
    one.computed_tokens, one.rewind_tokens = 5, 9
    kv.update(ScheduledBatch(generation=[one]))
    assert kv.used_blocks == 2


def test_no_blocks_for_one_names_it_with_numbers() -> None:
    kv = KVCacheManager(CountedStore(3, 4))
    one, other = request(7, 8), request(8, 8)
    one.chunk_tokens = other.chunk_tokens = 8
    with pytest.raises(CapacityError) as full:
        kv.prepare(ScheduledBatch(context_last=[one, other]))
    assert (full.value.request_id, full.value.needed, full.value.free) == (8, 2, 1)
    assert len(kv.block_table(one)) == 2
