"""The blocks of the pool: free, held by sequences, or kept for reuse until somebody needs the room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NO_PARENT = -1
PrefixKey = tuple[int, tuple[int, ...]]  # (parent block, token ids of this block)


class BlockPool:
    """Block ids with reference counts and a prefix tree over full blocks.

    A block whose last holder left stays readable while it is in the tree, and is evicted least recently used first.
    Holding a block means holding its parents, and a sequence gives its blocks back last first, so that no block is
    ever evicted before its children: a key's parent id always means what it meant when the key was stored.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._tree: dict[PrefixKey, int] = {}
        self._keys: dict[int, PrefixKey] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks that ``take`` can give: unused ones and those kept for reuse alone."""
        return len(self._free) + len(self._evictable)

    @property
    def used_blocks(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.free_blocks

    @property
    def reusable_blocks(self) -> int:
        """Blocks of the prefix tree, held or not."""
        return len(self._keys)

    def take(self) -> int:
        """A block with undefined contents, held once. The caller has checked ``free_blocks``."""
        block = self._free.pop() if self._free else self._evict()
        self._holders[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._tree[self._keys.pop(block)]
        return block

    def give_back(self, table: Sequence[int]) -> None:
        """One holder of a sequence's blocks leaves."""
        for block in reversed(table):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def claim_prefix(self, token_ids: Sequence[int], tokens_per_block: int) -> list[int]:
        """Hold the longest chain of kept blocks that ``token_ids`` starts with; returns them first to last."""
        claimed = self.find_prefix(token_ids, tokens_per_block)
        for block in claimed:
            self._evictable.pop(block, None)
            self._holders[block] += 1
        return claimed

    def find_prefix(self, token_ids: Sequence[int], tokens_per_block: int) -> list[int]:
        """The chain that ``claim_prefix`` would hold now."""
        found: list[int] = []
        parent = NO_PARENT
        for start in range(0, len(token_ids) - tokens_per_block + 1, tokens_per_block):
            block = self._tree.get((parent, tuple(token_ids[start : start + tokens_per_block])))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def store(self, table: Sequence[int], token_ids: Sequence[int], tokens_per_block: int) -> None:
        """Keep a held sequence's full blocks for reuse.

        Stops at the first block whose tokens another block stands for already: what follows would hang under a parent
        that this sequence does not hold.
        """
        parent = NO_PARENT
        for index in range(len(token_ids) // tokens_per_block):
            key = (parent, tuple(token_ids[index * tokens_per_block : (index + 1) * tokens_per_block]))
            if self._tree.setdefault(key, table[index]) != table[index]:
                return
            self._keys[table[index]] = key
            parent = table[index]

    def reset_reuse(self) -> None:
        """Forget the tree: contents are no longer what the keys say."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._tree.clear()
        self._keys.clear()
