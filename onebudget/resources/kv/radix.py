"""The prefix tree: which runs of blocks hold the tokens a text starts with.

Edges are compared as byte strings, whole edges at once, so the cost of a look-up grows with the number of places where
texts part, not with their blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from onebudget.resources.kv.node import TOKEN_BYTES, Node

PARTIAL_CANDIDATES = 4
"""How many continuations of a matched prefix are looked at for a block that shares its first tokens."""


@dataclass(slots=True)
class Match:
    """``nodes`` match altogether, first to last; ``tail_blocks`` blocks of ``tail``, the node behind them, match too.
    ``blocks`` counts all of it."""

    nodes: list[Node]
    tail: Node | None
    tail_blocks: int
    blocks: int


class PrefixTree:
    """Nodes below one root per space: the same tokens mean the same contents within a space only.

    ``visited`` counts nodes that were looked at.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.block_bytes = tokens_per_block * TOKEN_BYTES
        self._roots: dict[Hashable, Node] = {}
        self._spaces: dict[Node, Hashable] = {}
        self.visited = 0

    def root(self, space: Hashable = None) -> Node:
        """Of one adapter and salt, or whatever else parts texts from the beginning."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(None, b"", [], 0)
            if space is not None:
                self._spaces[root] = space
        return root

    def forget_root(self, root: Node) -> None:
        """Drop a root that nobody holds and nothing hangs under, so that spaces of the past cost nothing."""
        if not root.children and not root.held and root in self._spaces:
            del self._roots[self._spaces.pop(root)]

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def clear(self) -> None:
        self._roots.clear()
        self._spaces.clear()

    def match(self, node: Node, key: bytes, end: int, start: int = 0) -> Match:
        """The longest way down from ``node`` along ``key[start:end]``; both are whole blocks."""
        size = self.block_bytes
        nodes: list[Node] = []
        position = start
        while position < end:
            child = node.children.get(key[position : position + size])
            if child is None:
                break
            self.visited += 1
            length = len(child.blocks) * size
            if length != len(child.key):
                child.key = child.key[:length]  # blocks were dropped from its end
            if position + length > end or not key.startswith(child.key, position):
                tail_blocks = self._common(child.key, key, position, min(length, end - position))
                return Match(nodes, child, tail_blocks, (position - start) // size + tail_blocks)
            position += length
            nodes.append(child)
            node = child
        return Match(nodes, None, 0, (position - start) // size)

    def _common(self, edge: bytes, key: bytes, position: int, length: int) -> int:
        """Equal blocks at the beginning of ``edge`` and ``key[position:]``, of ``length`` bytes at most; the first is
        known to be equal."""
        size = self.block_bytes
        low, high = size, length
        if edge[:high] == key[position : position + high]:
            return high // size
        while low + size < high:  # equal up to low, not up to high
            middle = (low + high) // 2 // size * size
            if edge[low:middle] == key[position + low : position + middle]:
                low = middle
            else:
                high = middle
        return low // size

    def add(self, parent: Node, key: bytes, blocks: list[int], priority: int) -> Node:
        """A new node under ``parent``, on the device."""
        node = Node(parent, key, blocks, priority)
        parent.children[key[: self.block_bytes]] = node
        return node

    def split(self, node: Node, count: int) -> Node:
        """Part a node after ``count`` blocks; returns the new upper part. Whoever holds the node holds the lower one,
        which keeps its children and its places in the orders of eviction. The caller holds the upper part next."""
        size, parent = self.block_bytes, node.parent
        assert parent is not None and 0 < count < len(node.blocks)
        cut = count * size
        upper = Node(parent, node.key[:cut], node.blocks[:count], node.priority)
        upper.device_end = min(node.device_end, count)
        upper.near_end = min(node.near_end, count)
        upper.held = 1 if node.held else 0
        parent.children[node.key[:size]] = upper
        node.key, node.blocks, node.parent = node.key[cut:], node.blocks[count:], upper
        node.device_end -= upper.device_end
        node.near_end -= upper.near_end
        upper.children[node.key[:size]] = node
        return upper

    def unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self.block_bytes]]
        if parent.parent is None:
            self.forget_root(parent)

    def partial(self, match: Match, root: Node, key: bytes, end: int) -> tuple[Node, int, int] | None:
        """``(node, index of its block, tokens)`` of a device block behind the match that shares its first tokens.

        ``end`` is in bytes and need not be whole blocks. Looks at a few continuations only.
        """
        size, start = self.block_bytes, match.blocks * self.block_bytes
        wanted = key[start : min(start + size, end)]
        if match.tail is not None:
            candidates = [(match.tail, match.tail_blocks)]
        else:
            node = match.nodes[-1] if match.nodes else root
            candidates = [(child, 0) for child in islice(reversed(node.children.values()), PARTIAL_CANDIDATES)]
        best, tokens = None, 0
        for node, index in candidates:
            self.visited += 1
            if index < node.device_end:
                common = _common_tokens(node.key[index * size : index * size + len(wanted)], wanted)
                if common > tokens:
                    best, tokens = (node, index), common
        return None if best is None else (*best, tokens)


def _common_tokens(one: bytes, other: bytes) -> int:
    """Equal tokens at the beginning of two byte strings."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not difference:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
