from __future__ import annotations

from onebudget.resources.kv.blocks import BlockPool
from onebudget.resources.kv.node import Node, token_bytes
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.tier import CountedTier

SIZE = 2


def pool(blocks: int) -> BlockPool:
    return BlockPool(CountedStore(blocks, SIZE))


def find(blocks: BlockPool, tokens: list[int], space: object = None) -> list[int]:
    """Blocks of the longest kept prefix."""
    match = blocks.tree.match(blocks.tree.root(space), token_bytes(tokens), len(tokens) // SIZE * SIZE * 4)  # type: ignore[arg-type]
    table = [block for node in match.nodes for block in node.blocks]
    return table + (match.tail.blocks[: match.tail_blocks] if match.tail else [])


def claim(blocks: BlockPool, tokens: list[int]) -> tuple[Node, list[int]]:
    root = blocks.tree.root()
    claimed = blocks.claim(blocks.tree.match(root, token_bytes(tokens), len(tokens) // SIZE * SIZE * 4), root)
    return claimed.node, claimed.table()


def kept(blocks: BlockPool, tokens: list[int], space: object = None) -> list[int]:
    """A sequence of these tokens comes without looking, is kept and goes; returns its table."""
    root = blocks.tree.root(space)  # type: ignore[arg-type]
    blocks.hold(root)
    table = blocks.take(-(-len(tokens) // SIZE))
    full = len(tokens) // SIZE
    node = blocks.insert(root, token_bytes(tokens), 0, table, full) if full else root
    blocks.give_back(table[full:])
    blocks.release(node)
    return table


def test_a_new_pool_gives_every_block_once() -> None:
    one = pool(5)
    assert (one.free_blocks, one.used_blocks, one.evictable_blocks) == (5, 0, 0)
    assert sorted(one.take(2) + one.take(3)) == [0, 1, 2, 3, 4]
    assert (one.free_blocks, one.used_blocks) == (0, 5)


def test_blocks_are_cleared_the_first_time_they_are_taken() -> None:
    cleared: list[int] = []

    class Store(CountedStore):
        def clear_fresh(self, blocks: object) -> None:
            cleared.extend(blocks)  # type: ignore[call-overload]

    one = BlockPool(Store(4, SIZE))
    one.give_back(one.take(3))
    one.take(3)
    assert cleared == [0, 1, 2]
    one.take(1)
    assert cleared == [0, 1, 2, 3]


def test_full_blocks_are_found_again_in_order_and_a_partial_one_is_not() -> None:
    one = pool(5)
    first, second, _ = kept(one, [1, 2, 3, 4, 5])
    assert (one.evictable_blocks, one.free_blocks) == (2, 5)
    assert claim(one, [1, 2, 3, 4, 5, 6])[1] == [first, second]
    assert one.used_blocks == 2


def test_a_prefix_ends_where_texts_part() -> None:
    one = pool(5)
    first, *_ = kept(one, [1, 2, 3, 4])
    assert find(one, [1, 2, 9, 4]) == [first]
    assert find(one, [9, 2, 3, 4]) == find(one, [1]) == find(one, []) == []


def test_the_same_tokens_behind_another_beginning_are_not_the_same() -> None:
    one = pool(8)
    kept(one, [1, 2, 7, 7])
    other = kept(one, [3, 4, 7, 7])
    assert find(one, [3, 4, 7, 7]) == other


def test_spaces_part_texts_and_vanish_with_their_last_block() -> None:
    one = pool(4)
    mine, other = kept(one, [1, 2], "mine"), kept(one, [1, 2], "other")
    assert (find(one, [1, 2], "mine"), find(one, [1, 2], "other"), find(one, [1, 2])) == (mine, other, [])
    one.evict(4)
    assert len(one.tree.roots()) == 1


def test_a_block_two_sequences_hold_stays_until_both_left() -> None:
    one = pool(4)
    (block,) = kept(one, [1, 2])
    (first, _), (second, _) = claim(one, [1, 2]), claim(one, [1, 2])
    one.release(first)
    assert one.used_blocks == 1
    assert block not in one.take(3)
    assert one.free_blocks == 0
    one.release(second)
    assert one.take(1) == [block]


def test_kept_blocks_are_the_last_to_be_taken_and_the_end_of_the_oldest_text_goes_first() -> None:
    one = pool(5)
    old, new = kept(one, [1, 2, 3, 4]), kept(one, [5, 6])
    assert set(one.take(2)).isdisjoint(old + new)
    assert [one.take(1), one.take(1), one.take(1)] == [[old[1]], [old[0]], new]
    assert (one.evictable_blocks, one.counters.evicted) == (0, 3)


def test_use_makes_young() -> None:
    one = pool(2)
    first, second = kept(one, [1, 2]), kept(one, [3, 4])
    one.release(claim(one, [1, 2])[0])
    assert [one.take(1), one.take(1)] == [second, first]


def test_of_two_equal_texts_one_is_kept_and_the_second_sequence_moves_to_it() -> None:
    one = pool(4)
    root = one.tree.root()
    first, second = one.take(2), one.take(2)
    one.hold(root)
    node = one.insert(root, token_bytes([1, 2, 3, 4]), 0, first, 2)
    one.hold(root)
    same = one.insert(root, token_bytes([1, 2, 3, 4]), 0, second, 2)
    assert same is node
    assert second == first
    assert (one.used_blocks, one.free_blocks) == (2, 2)
    one.release(node)
    assert one.used_blocks == 2
    one.release(node)
    assert one.used_blocks == 0


def test_a_part_of_a_run_can_be_held_while_the_rest_is_given_up() -> None:
    one = pool(4)
    table = kept(one, [1, 2, 3, 4, 5, 6, 7, 8])
    node, held = claim(one, [1, 2, 3, 4])
    assert (held, one.free_blocks) == (table[:2], 2)
    assert sorted(one.take(2)) == sorted(table[2:])
    assert find(one, [1, 2, 3, 4, 5, 6, 7, 8]) == table[:2]
    one.release(node)
    assert one.free_blocks == 2


def test_reset_forgets_texts_and_frees_what_nobody_holds() -> None:
    one = pool(4)
    kept(one, [1, 2, 3, 4])
    node, _ = claim(one, [1, 2])
    one.reset_reuse()
    assert (one.evictable_blocks, one.free_blocks) == (0, 3)
    assert find(one, [1, 2]) == []
    one.release(node)
    assert sorted(one.take(4)) == [0, 1, 2, 3]


def test_lost_contents_are_cleared_again() -> None:
    one = pool(4)
    kept(one, [1, 2, 3, 4])
    one.reset_reuse()
    one.forget_contents()
    assert one.take(4) == [0, 1, 2, 3]


def filled(blocks: int) -> BlockPool:
    """Texts of 16 blocks each until the pool is full."""
    one = BlockPool(CountedStore(blocks, 16))
    root = one.tree.root()
    for number in range(blocks // 16):
        one.hold(root)
        key = token_bytes([number, *range(255)])
        one.release(one.insert(root, key, 0, one.take(16), 16))
    return one


def work(one: BlockPool, number: int) -> tuple[int, int]:
    """Nodes visited and moves in the order of eviction of: look up, claim, let go, evict, keep."""
    before = one.tree.visited, one.order.moves
    root = one.tree.root()
    key = token_bytes([number, *range(255)])
    claimed = one.claim(one.tree.match(root, key, len(key)), root)
    one.release(claimed.node)
    one.hold(root)
    fresh = token_bytes([-number - 1, *range(255)])
    one.release(one.insert(root, fresh, 0, one.take(16), 16))
    return one.tree.visited - before[0], one.order.moves - before[1]


def test_work_per_operation_does_not_depend_on_the_size_of_the_pool() -> None:
    counted = {}
    for blocks in (1024, 16_384, 262_144, 1_048_576):
        one = filled(blocks)
        counted[blocks] = {work(one, blocks // 32 + number) for number in range(8)}
    assert set(map(frozenset, counted.values())) == {frozenset(counted[1024])}
    assert len(counted[1024]) == 1


def test_what_was_cut_from_the_end_of_a_run_does_not_hide_what_comes_behind_it_later() -> None:
    one = pool(6)
    first, second, *_ = kept(one, [1, 2, 3, 4, 5, 6, 7, 8])
    one.give_back(one.take(4))  # two unused ones, and the last two of the run
    other = kept(one, [1, 2, 3, 4, 9, 9])
    assert find(one, [1, 2, 3, 4, 9, 9]) == [first, second, other[2]]
    assert find(one, [1, 2, 3, 4, 5, 6]) == [first, second]


def test_a_beginning_is_worth_what_hangs_under_it() -> None:
    one = pool(3)
    root = one.tree.root()
    one.hold(root)
    table = one.take(2)
    key = token_bytes([1, 2, 3, 4])
    node = one.insert(root, key, 0, table, 1, 35)
    one.release(one.insert(node, key, 1, table, 2, 80))
    one.hold(root)
    one.release(one.insert(root, token_bytes([5, 6]), 0, one.take(1), 1, 50))
    assert [one.take(1), one.take(1), one.take(1)] == [[2], [1], [0]]


def test_a_run_whose_device_part_is_claimed_is_no_longer_to_be_evicted() -> None:
    store = CountedStore(4, SIZE)
    one = BlockPool(store, near=CountedTier("host", 4))
    table = kept(one, [1, 2, 3, 4, 5, 6, 7, 8])
    other = one.take(2)
    assert set(other) == set(table[2:])
    node, held = claim(one, [1, 2, 3, 4])
    assert held == table[:2]
    assert one.order.first() is None
    one.release(node)
    assert one.evict(2) == 2
