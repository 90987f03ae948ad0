from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.errors import CapacityError
from onebudget.resources import KVCacheManager
from onebudget.resources.kv.manager import blocks_to_completion
from onebudget.resources.kv.store import CountedStore


def manager(blocks: int, tokens_per_block: int = 4) -> KVCacheManager:
    return KVCacheManager(CountedStore(blocks, tokens_per_block))


def request(number: int, prompt: int, *, new: int = 1) -> Request:
    return Request(number, [1] * prompt, SamplingParams(), max_new_tokens=new)


def step(kv: KVCacheManager, *chunks: tuple[Request, int]) -> None:
    """Prepare one step that computes this many prompt tokens of each request, and count them as computed."""
    batch = ScheduledBatch()
    for one, tokens in chunks:
        one.state = RequestState.CONTEXT
        one.chunk_tokens = tokens
        batch.add(one)
    kv.prepare(batch)
    for one, tokens in chunks:
        one.computed_tokens += tokens


@pytest.mark.parametrize(
    ("prompt", "new", "blocks"),
    [(100, 60, 5), (96, 1, 4), (64, 64, 4), (320, 160, 15), (32, 32, 2), (1, 1, 1), (31, 1, 1)],
)
def test_blocks_to_completion_of_worked_cases(prompt: int, new: int, blocks: int) -> None:
    assert blocks_to_completion(prompt, new, 32) == blocks


@given(prompt=st.integers(1, 500), new=st.integers(0, 500), size=st.integers(1, 64))
def test_blocks_to_completion_is_the_ceiling(prompt: int, new: int, size: int) -> None:
    assert blocks_to_completion(prompt, new, size) == -(-(prompt + new) // size)


def test_blocks_come_as_tokens_are_computed() -> None:
    kv, one = manager(8), request(0, 10)
    for tokens, held in ((3, 1), (1, 1), (1, 2), (5, 3)):
        step(kv, (one, tokens))
        assert len(kv.block_table(one)) == kv.used_blocks == held
    one.state = RequestState.GENERATION
    for produced, held in ((1, 3), (2, 3), (3, 4)):
        one.output_token_ids.append(5)
        kv.prepare(ScheduledBatch(generation=[one]))
        one.computed_tokens += 1
        assert (produced, len(kv.block_table(one))) == (produced, held)
    assert kv.peak_used_blocks == 4


def test_tables_never_share_and_the_pool_fills_exactly() -> None:
    kv = manager(6)
    first, second, third = request(0, 12), request(1, 11), request(2, 1)
    step(kv, (first, 12), (second, 11))
    assert sorted(kv.block_table(first) + kv.block_table(second)) == list(range(6))
    assert kv.free_blocks == 0
    with pytest.raises(CapacityError) as full:
        step(kv, (third, 1))
    assert (full.value.request_id, full.value.needed, full.value.free) == (2, 1, 0)
    for number in ("request 2", "needs 1", "0 of 6"):
        assert number in str(full.value)


def test_what_a_failed_request_lacks_is_not_taken() -> None:
    kv, one, other = manager(4), request(0, 8), request(1, 12)
    step(kv, (one, 8))
    with pytest.raises(CapacityError):
        step(kv, (other, 12))
    assert kv.free_blocks == 2
    kv.free(other)
    kv.free(one)
    assert kv.free_blocks == kv.max_resource_count() == 4


def test_repeating_prepare_takes_nothing_more() -> None:
    kv, one = manager(4), request(0, 7)
    one.chunk_tokens = 7
    batch = ScheduledBatch(context_last=[one])
    kv.prepare(batch)
    table = list(kv.block_table(one))
    kv.prepare(batch)
    assert kv.block_table(one) == table


def test_free_twice_and_unknown_is_free_once() -> None:
    kv, one = manager(4), request(0, 16)
    step(kv, (one, 16))
    for _ in range(2):
        kv.free(one)
    kv.free(request(9, 3))
    assert kv.free_blocks == 4
    step(kv, (other := request(1, 16), 16))
    assert sorted(kv.block_table(other)) == [0, 1, 2, 3]


def test_shutdown_releases_the_pool() -> None:
    kv = manager(4)
    kv.shutdown()
    assert cast("CountedStore", kv.groups[0].store).released


@given(
    size=st.integers(1, 8),
    moves=st.lists(st.tuples(st.sampled_from(["grow", "free"]), st.integers(0, 4), st.integers(1, 20)), max_size=60),
)
def test_any_order_keeps_tables_apart_and_ends_full(size: int, moves: list[tuple[str, int, int]]) -> None:
    kv = manager(10, size)
    members = {number: request(number, 1000) for number in range(5)}
    for move, number, tokens in moves:
        one = members[number]
        if move == "free":
            kv.free(one)
            members[number] = request(number, 1000)
            continue
        missing = -(-(one.computed_tokens + tokens) // size) - -(-one.computed_tokens // size)
        if missing <= kv.free_blocks:
            step(kv, (one, tokens))
        else:
            with pytest.raises(CapacityError) as full:
                step(kv, (one, tokens))
            assert (full.value.request_id, full.value.needed, full.value.free) == (number, missing, kv.free_blocks)
        held = [block for one in members.values() if one.computed_tokens for block in kv.block_table(one)]
        assert len(held) == len(set(held)) == kv.used_blocks <= 10
        assert kv.used_blocks == sum(-(-one.computed_tokens // size) for one in members.values())
    for one in members.values():
        kv.free(one)
    assert kv.free_blocks == 10
