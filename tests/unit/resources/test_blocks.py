from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onebudget.resources.kv.blocks import BlockPool

SIZE = 2


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.take() for _ in range(count)]


def kept(pool: BlockPool, tokens: list[int]) -> list[int]:
    """A sequence of these tokens comes, is kept and goes; returns its blocks."""
    table = take(pool, -(-len(tokens) // SIZE))
    pool.store(table, tokens, SIZE)
    pool.give_back(table)
    return table


def test_a_new_pool_gives_every_block_once() -> None:
    pool = BlockPool(5)
    assert (pool.free_blocks, pool.used_blocks, pool.reusable_blocks) == (5, 0, 0)
    assert sorted(take(pool, 5)) == [0, 1, 2, 3, 4]
    assert (pool.free_blocks, pool.used_blocks) == (0, 5)


def test_full_blocks_are_found_again_in_order_and_a_partial_one_is_not() -> None:
    pool = BlockPool(5)
    first, second, _ = kept(pool, [1, 2, 3, 4, 5])
    assert pool.reusable_blocks == 2
    assert pool.free_blocks == 5
    assert pool.claim_prefix([1, 2, 3, 4, 5, 6], SIZE) == [first, second]
    assert pool.used_blocks == 2


def test_a_prefix_ends_where_texts_part() -> None:
    pool = BlockPool(5)
    first, *_ = kept(pool, [1, 2, 3, 4])
    assert pool.claim_prefix([1, 2, 9, 4], SIZE) == [first]
    assert pool.claim_prefix([9, 2, 3, 4], SIZE) == []
    assert pool.claim_prefix([1], SIZE) == []
    assert pool.claim_prefix([], SIZE) == []


def test_the_same_tokens_behind_another_beginning_are_not_the_same() -> None:
    pool = BlockPool(8)
    kept(pool, [1, 2, 7, 7])
    other = kept(pool, [3, 4, 7, 7])
    assert pool.claim_prefix([3, 4, 7, 7], SIZE) == other


def test_a_block_two_sequences_hold_stays_until_both_left() -> None:
    pool = BlockPool(4)
    table = kept(pool, [1, 2])
    claimed = pool.claim_prefix([1, 2], SIZE)
    again = pool.claim_prefix([1, 2], SIZE)
    assert claimed == again == table
    pool.give_back(claimed)
    assert pool.used_blocks == 1
    assert table[0] not in take(pool, 3)
    assert pool.free_blocks == 0
    pool.give_back(again)
    assert pool.take() == table[0]


def test_kept_blocks_are_the_last_to_be_taken_and_the_oldest_leaf_goes_first() -> None:
    pool = BlockPool(5)
    old, new = kept(pool, [1, 2, 3, 4]), kept(pool, [5, 6])
    assert set(take(pool, 2)).isdisjoint(old + new)
    assert [pool.take(), pool.take(), pool.take()] == [old[1], old[0], *new]
    assert pool.reusable_blocks == 0


def test_use_makes_young() -> None:
    pool = BlockPool(2)
    first, second = kept(pool, [1, 2]), kept(pool, [3, 4])
    pool.give_back(pool.claim_prefix([1, 2], SIZE))
    assert [pool.take(), pool.take()] == [*second, *first]


def test_of_two_equal_texts_one_is_kept() -> None:
    pool = BlockPool(4)
    first, second = take(pool, 2), take(pool, 2)
    pool.store(first, [1, 2, 3, 4], SIZE)
    pool.store(second, [1, 2, 3, 4], SIZE)
    assert pool.reusable_blocks == 2
    pool.give_back(second)
    pool.give_back(first)
    assert pool.claim_prefix([1, 2, 3, 4], SIZE) == first
    assert pool.free_blocks == 2


def test_storing_again_what_grew() -> None:
    pool = BlockPool(4)
    table = take(pool, 2)
    pool.store(table, [1, 2, 3], SIZE)
    pool.store(table, [1, 2, 3, 4], SIZE)
    pool.give_back(table)
    assert pool.claim_prefix([1, 2, 3, 4], SIZE) == table


def test_reset_forgets_texts_and_frees_what_nobody_holds() -> None:
    pool = BlockPool(4)
    kept(pool, [1, 2, 3, 4])
    held = pool.claim_prefix([1, 2], SIZE)
    pool.reset_reuse()
    assert (pool.reusable_blocks, pool.free_blocks) == (0, 3)
    assert pool.claim_prefix([1, 2], SIZE) == []
    pool.give_back(held)
    assert sorted(take(pool, 4)) == [0, 1, 2, 3]


texts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(st.lists(st.tuples(st.sampled_from(["come", "go", "reset"]), st.integers(0, 3), texts), min_size=8, max_size=60))
def test_a_claimed_block_always_holds_what_it_is_claimed_for(moves: list[tuple[str, int, list[int]]]) -> None:
    """Contents are followed beside the pool: every block remembers the whole text up to its end."""
    pool, running, contents = BlockPool(12), dict[int, tuple[list[int], list[int]]](), dict[int, tuple[int, ...]]()

    def leave(seat: int) -> None:
        table, tokens = running.pop(seat)
        pool.store(table, tokens, SIZE)
        pool.give_back(table)

    for move, seat, tokens in moves:
        if seat in running:
            leave(seat)
        if move == "reset":
            pool.reset_reuse()
        if move != "come":
            continue
        table = pool.claim_prefix(tokens, SIZE)
        for index, block in enumerate(table):
            assert contents[block] == tuple(tokens[: (index + 1) * SIZE])
        missing = -(-len(tokens) // SIZE) - len(table)
        if missing > pool.free_blocks:
            pool.give_back(table)
            continue
        table += take(pool, missing)
        for index in range(len(table) - missing, len(table)):
            contents[table[index]] = tuple(tokens[: (index + 1) * SIZE])
        running[seat] = table, tokens
        held = {block for blocks, _ in running.values() for block in blocks}
        assert pool.used_blocks == len(held)
    for seat in list(running):
        leave(seat)
    assert pool.free_blocks == 12
