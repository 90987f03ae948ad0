from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.devtools.kv_lives import MovingTier, WrittenStore
from onebudget.errors import CapacityError, ConfigError
from onebudget.resources import KVCacheManager, KVCacheManagerV2
from onebudget.resources.kv.choice import kv_manager
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.helix import HelixRank
from onebudget.resources.kv.store import CountedStore

SIZE = 4
sizes = st.integers(1, 16)
groups = st.integers(1, 5)


def ranks_of(cp_size: int) -> list[HelixRank]:
    return [HelixRank(cp_size, rank) for rank in range(cp_size)]


def managers(blocks: int, cp_size: int = 2, size: int = SIZE, **settings: int) -> list[KVCacheManager]:
    """One manager per rank, with equal pools."""
    return [KVCacheManagerV2(CountedStore(blocks, size), helix=helix, **settings) for helix in ranks_of(cp_size)]


def request(prompt: int, new: int = 8, number: int = 0) -> Request:
    state = RequestState.CONTEXT
    return Request(number, [1] * prompt, SamplingParams(), max_new_tokens=new, chunk_tokens=prompt, state=state)


def owner(prompt: int, position: int, size: int, cp_size: int) -> int:
    """The rank of one token, said token by token."""
    if position < prompt:
        return position // size % cp_size
    iteration = position - prompt + 1
    return (iteration - 1) // size % cp_size


def generating(one: Request) -> ScheduledBatch:
    one.state = RequestState.GENERATION
    return ScheduledBatch(generation=[one])


# Counts


@pytest.mark.parametrize(
    ("prompt", "tokens", "kept"),
    [
        (8, 0, (0, 0)),
        (8, 1, (1, 0)),
        (8, 4, (4, 0)),
        (8, 5, (4, 1)),
        (8, 8, (4, 4)),
        (8, 9, (5, 4)),  # the answer starts on rank 0
        (8, 12, (8, 4)),
        (8, 13, (8, 5)),
        (8, 16, (8, 8)),
        (8, 17, (9, 8)),
        (6, 6, (4, 2)),
        (6, 7, (5, 2)),  # though rank 1 has the prompt's last block
        (6, 10, (8, 2)),
        (6, 11, (8, 3)),
        (9, 9, (5, 4)),
        (9, 13, (9, 4)),  # one of the prompt's last block, then a block of the answer
        (3, 3, (3, 0)),
        (3, 8, (7, 1)),
    ],
)
def test_worked_tokens_of_two_ranks_with_blocks_of_four(prompt: int, tokens: int, kept: tuple[int, int]) -> None:
    one = request(prompt)
    assert tuple(helix.local_tokens(one, tokens, SIZE) for helix in ranks_of(2)) == kept
    assert sum(kept) == tokens


@pytest.mark.parametrize(
    ("prompt", "new", "blocks"),
    [(8, 8, (2, 2)), (8, 4, (2, 1)), (8, 5, (2, 2)), (9, 3, (2, 1)), (9, 4, (3, 1)), (6, 4, (2, 1)), (6, 6, (2, 1)),
     (6, 7, (2, 2)), (1, 1, (1, 0)), (16, 1, (3, 2)), (17, 3, (3, 2)), (17, 4, (4, 2))],
)  # fmt: skip
def test_worked_blocks_to_completion_are_those_of_the_rank(prompt: int, new: int, blocks: tuple[int, int]) -> None:
    one = request(prompt, new)
    for kv, needed in zip(managers(9), blocks, strict=True):
        assert kv.needed_to_completion(one) == needed
        assert kv.growth(one, prompt + new) == needed
        assert kv.request_kv_block_budget(one) == (needed, 9)


def test_beams_extra_tokens_and_drafts_are_counted_on_the_rank_that_gets_them() -> None:
    """Ranks 0 and 1 keep 5 and 4 of 9 prompt tokens; of 6 + 1 + 1 new ones 4 each, which every beam has for itself."""
    one = request(9, 6)
    settings = {"extra_kv_tokens": 1, "draft_reserve_tokens": 1, "beam_width": 3}
    budgets = [kv.request_kv_block_budget(one) for kv in managers(20, **settings)]
    assert budgets == [(1 + 2 * 3, 20), (1 + 1 * 3, 20)]


@given(prompt=st.integers(1, 200), new=st.integers(0, 200), size=sizes, cp_size=groups)
def test_the_ranks_together_keep_every_token_once(prompt: int, new: int, size: int, cp_size: int) -> None:
    one, total = request(prompt), prompt + new
    kept = [helix.local_tokens(one, total, size) for helix in ranks_of(cp_size)]
    owners = [owner(prompt, position, size, cp_size) for position in range(total)]
    assert kept == [owners.count(rank) for rank in range(cp_size)]
    assert sum(kept) == total
    assert kept == sorted(kept, reverse=True)
    for helix, tokens in zip(ranks_of(cp_size), kept, strict=True):
        assert sum(helix.shares(one, new, size)) == tokens
    blocks = [-(-tokens // size) for tokens in kept]
    assert -(-total // size) <= sum(blocks) < -(-total // size) + cp_size
    one.max_new_tokens = new
    assert [kv.needed_to_completion(one) for kv in managers(1, cp_size, size)] == blocks


@given(iterations=st.integers(0, 400), size=sizes, cp_size=groups)
def test_decode_iterations_go_round_by_blocks(iterations: int, size: int, cp_size: int) -> None:
    kept = [helix.kept(iterations, size) for helix in ranks_of(cp_size)]
    assert sum(kept) == iterations
    assert max(kept) - min(kept) <= size
    for helix, tokens in zip(ranks_of(cp_size), kept, strict=True):
        assert sum(helix.is_active(iteration, size) for iteration in range(1, iterations + 1)) == tokens


@given(prompt=st.integers(1, 100), local=st.integers(0, 100), size=sizes, cp_size=groups)
def test_reach_goes_to_the_next_token_that_is_too_much(prompt: int, local: int, size: int, cp_size: int) -> None:
    one = request(prompt)
    for helix in ranks_of(cp_size):
        reach = helix.reach(one, local, size)
        assert helix.local_tokens(one, reach, size) <= local
        assert helix.local_tokens(one, reach + 1, size) == local + 1


@given(prompt=st.integers(1, 60), tokens=st.integers(0, 120), size=sizes)
def test_a_group_of_one_keeps_everything(prompt: int, tokens: int, size: int) -> None:
    assert HelixRank(1, 0).local_tokens(request(prompt), tokens, size) == tokens


@pytest.mark.parametrize(("cp_size", "rank", "words"), [(0, 0, "cp_size = 0"), (2, 2, "from 0 to 1"), (2, -1, "rank")])
def test_a_rank_outside_its_group_is_refused(cp_size: int, rank: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HelixRank(cp_size, rank)


# Steps


def test_a_rank_takes_blocks_only_for_its_own_tokens() -> None:
    one = request(6, 12)
    pair = managers(9)
    for kv in pair:
        kv.prepare(ScheduledBatch(context_last=[one]))
    assert [kv.used_blocks for kv in pair] == [1, 1]
    seen = []
    for _ in range(12):
        one.computed_tokens = 6 + len(seen)
        for kv in pair:
            kv.prepare(generating(one))
        seen.append([kv.used_blocks for kv in pair])
    # Four tokens for rank 0, four for rank 1, of which two fill its block of the prompt, then rank 0 again.
    assert seen == [[2, 1]] * 6 + [[2, 2]] * 2 + [[3, 2]] * 4
    for kv in pair:
        kv.free(one)
        assert kv.free_blocks == 9


@pytest.mark.parametrize(("rank", "blocks"), [(0, 5), (1, 4)])
def test_a_pool_filled_to_the_block_takes_not_one_token_more(rank: int, blocks: int) -> None:
    """Rank 0 keeps 9 + 8 of 17 and 16 tokens, rank 1 keeps 8 + 8."""
    kv = managers(blocks)[rank]
    one, more = request(17, 16), request(1, 1 if rank == 0 else 5, number=1)
    assert kv.request_kv_block_budget(one) == (blocks, blocks)
    assert kv.resize(one, 17)
    one.computed_tokens = 32
    kv.prepare(generating(one))
    assert kv.free_blocks == 0
    assert not kv.resize(more, more.prompt_tokens + more.max_new_tokens)
    more.computed_tokens = more.prompt_tokens + more.max_new_tokens - 1
    kv.groups[0].open(more.id)
    with pytest.raises(CapacityError, match="needs 1 more KV blocks") as full:
        kv.prepare(generating(more))
    assert full.value.request_id == 1
    kv.free(more)
    kv.free(one)
    assert kv.free_blocks == blocks


def test_a_request_larger_than_the_pool_of_a_rank_is_told_apart() -> None:
    first, second = managers(4)
    assert first.request_kv_block_budget(request(17, 12)) == (5, 4)
    assert first.request_kv_block_budget(request(16, 16)) == (4, 4)
    assert second.request_kv_block_budget(request(17, 12)) == (3, 4)


@given(
    prompt=st.integers(1, 40),
    size=sizes,
    cp_size=groups,
    reserve=st.integers(0, 3),
    extra=st.integers(0, 2),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20),
)
def test_rejected_drafts_give_their_blocks_back(
    prompt: int, size: int, cp_size: int, reserve: int, extra: int, steps: list[tuple[int, int]]
) -> None:
    """Between steps each rank has blocks for what it keeps of the tokens so far, the next one and the reserves."""
    one = request(prompt)
    ranks = managers(200, cp_size, size, draft_reserve_tokens=reserve, extra_kv_tokens=extra)

    def kept(rank: int, tokens: int) -> int:
        owners = [owner(prompt, position, size, cp_size) for position in range(tokens)]
        return -(-owners.count(rank) // size)

    for kv in ranks:
        kv.prepare(ScheduledBatch(context_last=[one]))
    one.computed_tokens = prompt
    for drafts, accepted in steps:
        one.draft_tokens = [5] * drafts
        ahead = one.computed_tokens + 1 + extra + max(drafts, reserve)
        for rank, kv in enumerate(ranks):
            kv.prepare(generating(one))
            assert len(kv.block_table(one)) >= kept(rank, ahead)
        accepted = min(drafts, accepted)
        one.computed_tokens += 1 + accepted
        one.rewind_tokens = 1 + drafts - accepted
        for rank, kv in enumerate(ranks):
            kv.update(generating(one))
            assert len(kv.block_table(one)) <= max(kept(rank, one.computed_tokens + 1 + extra + reserve), 0)
    for kv in ranks:
        kv.free(one)
        assert kv.free_blocks == 200


# Dummies, reuse, and where helix is refused


def test_dummies_are_two_tokens_on_every_rank() -> None:
    for kv in managers(4, 3):
        (plain,) = kv.add_dummy_requests([-1]) or []
        (decode,) = kv.add_dummy_requests([-2], generation=True, draft_tokens=2) or []
        (single,) = kv.add_dummy_requests([-3], helix=False) or []
        assert (plain.prompt_tokens, decode.prompt_tokens, single.prompt_tokens) == (2, 2, 1)
        assert kv.used_blocks == 3
        kv.prepare(ScheduledBatch(context_last=[plain], generation=[decode]))
        assert kv.used_blocks == 3
        assert kv.add_dummy_requests([-4], tokens=5) is None
        for dummy in (plain, decode, single):
            kv.free(dummy)
        assert kv.free_blocks == 4


def test_without_helix_a_dummy_is_one_token() -> None:
    (dummy,) = KVCacheManager(CountedStore(4, SIZE)).add_dummy_requests([-1]) or []
    assert dummy.prompt_tokens == 1


def test_nothing_is_reused_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kv = KVCacheManager(CountedStore(20, SIZE), helix=HelixRank(2, 0), reuse=True)
        for number in range(3):
            one = request(16, number=number)
            assert kv.reusable_tokens(one) == 0
            kv.prepare(ScheduledBatch(context_last=[one]))
            assert one.computed_tokens == 0
            one.computed_tokens = 16
            kv.update(ScheduledBatch(context_last=[one]))
            kv.free(one)
    assert not kv.reuses
    assert kv.groups[0].blocks.evictable_blocks == 0
    assert [record.message for record in caplog.records if "not reused under helix" in record.message] == [
        "prefixes are not reused under helix: a rank's blocks alone don't tell the text they belong to"
    ]


def test_under_helix_nobody_is_suspended() -> None:
    store = WrittenStore(20, SIZE)
    kv = KVCacheManagerV2([KVGroup(store, near=MovingTier("host", 20, store))], helix=HelixRank(2, 0))
    one = request(10)
    assert kv.resize(one, 10)
    assert not kv.suspend(one)
    assert kv.used_blocks == 2
    kv.free(one)
    assert kv.free_blocks == 20


def test_windows_and_the_first_manager_are_refused() -> None:
    windowed = [KVGroup(CountedStore(40, SIZE)), KVGroup(CountedStore(40, SIZE), window_tokens=64)]
    with pytest.raises(ConfigError, match="windows of 64 tokens"):
        KVCacheManager(windowed, helix=HelixRank(2, 0))
    plain = [KVGroup(CountedStore(4, SIZE))]
    with pytest.raises(ConfigError, match="'v2' under helix"):
        kv_manager(plain, BudgetConfig(max_seq_len=100), helix=HelixRank(2, 0))
    kv = kv_manager(
        plain, BudgetConfig(max_seq_len=100, kv_cache_manager="v2", enable_block_reuse=False), helix=HelixRank(2, 1)
    )
    assert isinstance(kv, KVCacheManagerV2)
    assert kv.helix == HelixRank(2, 1)
