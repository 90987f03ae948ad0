"""The blocks of one pool: free, held by sequences, or kept for reuse until somebody needs the room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.resources.kv.counters import KVCounters
from onebudget.resources.kv.node import DEFAULT_PRIORITY, Node
from onebudget.resources.kv.order import EvictionOrder
from onebudget.resources.kv.radix import Match, PrefixTree
from onebudget.resources.kv.spill import Spill

if TYPE_CHECKING:
    from onebudget.resources.kv.store import KVStore
    from onebudget.resources.kv.tier import BlockTier

DEFAULT_OFFLOAD_THRESHOLD = 0
"""Blocks whose priority is above this go to a lower tier when they are evicted."""


@dataclass(slots=True)
class Claim:
    """A prefix somebody holds, by the node it ends in. Parts of it may be below the device until it is onboarded."""

    node: Node

    def nodes(self) -> list[Node]:
        """First to last. Nodes may be split as long as they are held, so nobody keeps this."""
        nodes: list[Node] = []
        node = self.node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def table(self) -> list[int]:
        nodes = self.nodes()
        if len(nodes) == 1:
            return nodes[0].blocks[:]
        table: list[int] = []
        for node in nodes:
            table += node.blocks
        return table


class BlockPool:
    """Block ids, the prefix tree over those that are full, and the order in which kept ones are given up.

    A block is free, or private to one sequence, or in the tree. Holding a node means holding everything above it, so a
    sequence holds its prefix by holding the node it ends in. Whoever lets go of a node last lists it for eviction,
    ends of texts before their beginnings: the block that nobody wanted for the longest time goes first.

    ``fresh`` blocks were never used; the store clears them when they are taken for the first time.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        near: BlockTier | None = None,
        far: BlockTier | None = None,
        offload_threshold: int = DEFAULT_OFFLOAD_THRESHOLD,
        counters: KVCounters | None = None,
    ) -> None:
        self.store = store
        self.num_blocks = store.num_blocks
        self.counters = counters or KVCounters()
        self.tree = PrefixTree(store.tokens_per_block)
        self.order = EvictionOrder()
        self.spill = None if near is None else Spill(store, near, far, self.cut, self.counters)
        self._threshold = offload_threshold
        self._recycled: list[int] = []
        self._next_fresh = 0
        self._evictable = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that ``take`` can give: unused ones and those kept for reuse alone."""
        return len(self._recycled) + self.num_blocks - self._next_fresh + self._evictable

    @property
    def used_blocks(self) -> int:
        """Blocks that a sequence holds."""
        return self._next_fresh - len(self._recycled) - self._evictable

    @property
    def evictable_blocks(self) -> int:
        return self._evictable

    def take(self, count: int) -> list[int]:
        """Blocks with undefined contents. The caller has checked ``free_blocks``."""
        recycled = self._recycled
        if count <= len(recycled):
            if count == 1:
                return [recycled.pop()]
            if count <= 0:
                return []
            taken = recycled[-count:]
            del recycled[-count:]
            return taken
        taken = recycled[:]
        recycled.clear()
        fresh = min(count - len(taken), self.num_blocks - self._next_fresh)
        if fresh:
            first, self._next_fresh = self._next_fresh, self._next_fresh + fresh
            unused = range(first, self._next_fresh)
            self.store.clear_fresh(unused)
            taken += unused
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Private blocks of a sequence that no longer needs them."""
        self._recycled += blocks

    def resize(self, num_blocks: int) -> None:
        """Give out blocks below ``num_blocks`` alone, those that are new as fresh ones. Nothing is kept for reuse.

        Whoever holds one beyond takes another for it, of which the caller has checked that there are enough.
        """
        assert not self._evictable
        self._recycled = [block for block in self._recycled if block < num_blocks]
        self._next_fresh = min(self._next_fresh, num_blocks)
        self.num_blocks = num_blocks

    def evict(self, count: int) -> int:
        """Turn up to ``count`` kept blocks into unused ones, as ``take`` would; returns how many."""
        count = min(count, self._evictable)
        self._recycled += self._evict(count)
        return count

    def _evict(self, count: int) -> list[int]:
        taken: list[int] = []
        self._evictable -= count
        self.counters.evicted += count
        while count:
            node = self.order.first()
            assert node is not None
            end = node.device_end
            start = max(0, end - count)
            blocks = node.blocks[start:end]
            if self.spill is None:
                del node.blocks[start:]
                node.device_end = node.near_end = start
                if start == 0:
                    self.tree.unlink(node)
            else:
                self._move_out(self.spill, node, start, blocks)
            if start == 0:
                self.order.discard(node)
            taken += blocks
            count -= end - start
        return taken

    def _move_out(self, spill: Spill, node: Node, start: int, blocks: list[int]) -> None:
        """Blocks leave for the near tier. What finds no room there is dropped, and all behind it."""
        kept = spill.take_over(node, start, blocks) if node.priority > self._threshold else 0
        if kept < len(blocks):
            self.cut(node, start + kept)
        node.device_end = start
        if kept:
            spill.near.order.append(node)

    def cut(self, node: Node, keep: int) -> None:
        """Drop a node's blocks from index ``keep`` on, and all nodes under it. Slots return to their tiers; device
        blocks that are cut belong to the caller."""
        below = list(node.children.values())
        node.children = {}
        while below:
            one = below.pop()
            assert not one.held and not one.device_end
            self.tree.visited += 1
            below += one.children.values()
            self._drop_slots(one, 0)
        if keep == 0:
            self.tree.unlink(node)
        self._drop_slots(node, keep)

    def _drop_slots(self, node: Node, keep: int) -> None:
        if self.spill is not None:
            self.spill.return_slots(node, keep)
        del node.blocks[keep:]
        node.device_end = min(node.device_end, keep)
        node.near_end = min(node.near_end, keep)
        if self.spill is not None:
            self.spill.relist(node)

    def hold(self, node: Node) -> None:
        while True:
            node.held += 1
            if node.held > 1 or node.parent is None:
                return
            self.tree.visited += 1
            self._evictable -= node.device_end
            self.order.discard(node)
            if self.spill is not None:
                self.spill.unlist(node)
            node = node.parent

    def release(self, node: Node) -> None:
        while True:
            node.held -= 1
            if node.held:
                return
            if node.parent is None:
                self.tree.forget_root(node)
                return
            self.tree.visited += 1
            if node.device_end:
                self._evictable += node.device_end
                self.order.append(node)
            if self.spill is not None:
                self.spill.list_(node)
            node = node.parent

    def claim(self, match: Match, root: Node) -> Claim:
        """Hold what was matched, until ``release(claim.node)``."""
        node = match.nodes[-1] if match.nodes else root
        if match.tail is not None:
            node = match.tail
            if match.tail_blocks < len(node.blocks):
                node = self._split(node, match.tail_blocks)
        self.hold(node)
        return Claim(node)

    def _split(self, node: Node, count: int) -> Node:
        """The upper part, which the caller holds next."""
        upper = self.tree.split(node, count)
        if not node.held:
            if not node.device_end:
                self.order.discard(node)
            if self.spill is not None:
                self.spill.relist(node)
        return upper

    def onboard(self, claims: list[Claim]) -> None:
        """Bring everything claimed to the device. A claim is shortened where that is impossible, for want of blocks or
        because a lower tier lost what it held; all claims that are not onboarded yet must be among ``claims``."""
        if self.spill is None:
            return
        for claim in claims:
            for node in claim.nodes():
                if node.device_end < len(node.blocks) and not self._bring_back(self.spill, node, claims):
                    break

    def _bring_back(self, spill: Spill, node: Node, claims: list[Claim]) -> bool:
        wanted = len(node.blocks) - node.device_end
        blocks = self.take(min(wanted, self.free_blocks))
        good = spill.bring_back(node, blocks)
        self.give_back(blocks[good:])
        if good == wanted:
            return True
        if node.device_end:
            self._split(node, node.device_end)
        assert node.parent is not None
        for claim in claims:
            if node in claim.nodes():
                held, claim.node = claim.node, node.parent
                self.hold(claim.node)
                self.release(held)
        if good < len(blocks):  # its contents are lost, and nothing behind them can be reached
            self.cut(node, 0)
        return False

    def insert(
        self, node: Node, key: bytes, start: int, table: list[int], end: int, priority: int = DEFAULT_PRIORITY
    ) -> Node:
        """Keep full blocks of a sequence that holds ``node``, its first ``start`` blocks; returns the node it holds
        instead.

        Blocks ``table[start:end]`` are its own, for tokens ``key[start blocks : end blocks]``. Where the tree stands
        for the same tokens already, the sequence takes over the tree's block and gives its own back; what the tree had
        below the device stands on the sequence's block from now on. ``table`` is changed in place.
        """
        size = self.tree.block_bytes
        if priority > node.priority:
            self._raise_priority(node, priority)
        if key[start * size : (start + 1) * size] not in node.children:  # nothing to walk: the usual case
            child = self.tree.add(node, key[start * size : end * size], table[start:end], priority)
            child.held = 1
            return child
        match = self.tree.match(node, key, end * size, start * size)
        nodes = match.nodes
        if match.tail is not None:
            tail = match.tail
            nodes.append(tail if match.tail_blocks == len(tail.blocks) else self._split(tail, match.tail_blocks))
        last = nodes[-1]
        self.hold(last)
        self.release(node)
        for matched in nodes:
            self._adopt(matched, table, start)
            start += len(matched.blocks)
        if priority > last.priority:
            self._raise_priority(last, priority)
        return last if start == end else self.insert(last, key, start, table, end, priority)

    def _adopt(self, node: Node, table: list[int], start: int) -> None:
        """A held node and a sequence's own blocks from ``table[start]`` on stand for the same tokens."""
        on_device, count = node.device_end, len(node.blocks)
        self._recycled += table[start : start + on_device]
        table[start : start + on_device] = node.blocks[:on_device]
        if on_device < count:
            assert self.spill is not None
            self.spill.return_slots(node, on_device)
            node.blocks[on_device:] = table[start + on_device : start + count]
            node.device_end = node.near_end = count

    def _raise_priority(self, node: Node, priority: int) -> None:
        """A beginning is worth at least what hangs under it. The node is held, so it is listed nowhere."""
        above: Node | None = node
        while above is not None and above.parent is not None and above.priority < priority:
            above.priority = priority
            above = above.parent

    def reset_reuse(self) -> None:
        """Forget the tree: contents are no longer what it says. Nodes that are held stay with their holders and are
        found by nobody."""
        below = [child for root in self.tree.roots() for child in root.children.values()]
        while below:
            node = below.pop()
            below += node.children.values()
            if not node.held:
                self._recycled += node.blocks[: node.device_end]
                assert node.parent is not None
                self.tree.unlink(node)
        self._evictable = 0
        self.order.clear()
        if self.spill is not None:
            self.spill.reset()
        self.tree.clear()

    def forget_contents(self) -> None:
        """The memory behind the blocks was replaced: no block counts as cleared."""
        if self.used_blocks == 0 and self._evictable == 0:
            self._recycled.clear()
            self._next_fresh = 0
        else:
            self.store.clear_fresh(range(self._next_fresh))
