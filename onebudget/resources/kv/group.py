"""Layers with one attention window: their pool, and the block tables of the sequences in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from onebudget.errors import CapacityError
from onebudget.resources.kv.blocks import BlockPool, Claim
from onebudget.resources.kv.node import Node
from onebudget.resources.units import BlocksDelta, BlocksTotal
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onebudget.core import Request
    from onebudget.resources.kv.counters import KVCounters
    from onebudget.resources.kv.store import KVStore
    from onebudget.resources.kv.tier import BlockTier

RETURNED = 0
"""What a table says where a block was given back; nobody reads it."""


class KVSequence:
    """One sequence in one group.

    ``table`` is its block table. The first ``stored`` blocks belong to the prefix tree, where the sequence holds
    ``node``; the first ``returned`` entries were given back. The rest is private. Of one that ``pretends`` a single
    block stands for all.
    """

    __slots__ = ("node", "pretends", "returned", "stored", "table")

    def __init__(self, table: list[int], node: Node, stored: int, *, pretends: bool = False) -> None:
        self.table = table
        self.node = node
        self.stored = stored
        self.returned = 0
        self.pretends = pretends


class KVGroup:
    """``window_tokens`` None: its layers attend to everything. ``step_slack_blocks``: blocks of a windowed group that
    admission leaves alone, for what a step's prompt pieces hold beside the windows they read. ``serves_any_batch``: the
    pool has room for whatever a full batch does, so nobody has to count its blocks."""

    def __init__(
        self,
        store: KVStore,
        *,
        layers: Sequence[int] = (),
        window_tokens: int | None = None,
        step_slack_blocks: int = 0,
        serves_any_batch: bool = False,
        near: BlockTier | None = None,
        far: BlockTier | None = None,
        counters: KVCounters | None = None,
    ) -> None:
        self.store = store
        self.layers = tuple(layers)
        self.window_tokens = window_tokens
        self.tokens_per_block = store.tokens_per_block
        self.blocks = BlockPool(store, near=near, far=far, counters=counters)
        self.sequences: dict[int, KVSequence] = {}
        self.serves_any_batch = serves_any_batch
        self._slack = step_slack_blocks
        self.set_aside_blocks = 0
        """Held for good by padding dummies, so admission does not count on them."""
        self.peak_used_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return self.store.num_blocks

    @property
    def capacity(self) -> BlocksTotal:
        """Blocks to admit against."""
        return BlocksTotal(self.num_blocks - self._slack - self.set_aside_blocks)

    @property
    def free_blocks(self) -> int:
        return self.blocks.free_blocks

    @property
    def used_blocks(self) -> int:
        return self.blocks.used_blocks

    def note_peak(self) -> None:
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)

    def blocks_at_end(self, tokens: int) -> BlocksTotal:
        """Blocks that a sequence of ``tokens`` holds between steps."""
        blocks = ceil_div(tokens, self.tokens_per_block)
        if self.window_tokens is None:
            return BlocksTotal(blocks)
        return BlocksTotal(min(blocks, window_reach_blocks(self.window_tokens, self.tokens_per_block)))

    def front_removed(self, tokens: int) -> int:
        """Blocks from the front that no token behind the first ``tokens`` sees."""
        if self.window_tokens is None:
            return 0
        return max(0, tokens - self.window_tokens + 1) // self.tokens_per_block

    def block_table(self, request: Request) -> list[int]:
        return self.sequences[request.id].table

    def first_block(self, request: Request) -> int:
        """Index of the first block that is still there."""
        return self.sequences[request.id].returned

    def open(self, request_id: int, space: Hashable = None) -> KVSequence:
        """A new sequence without blocks; ``space`` is that of its prefixes."""
        root = self.blocks.tree.root(space)
        self.blocks.hold(root)
        sequence = self.sequences[request_id] = KVSequence([], root, 0)
        return sequence

    def open_claimed(self, request_id: int, claim: Claim) -> KVSequence:
        """A new sequence of what was claimed."""
        table = claim.table()
        sequence = self.sequences[request_id] = KVSequence(table, claim.node, len(table))
        return sequence

    def open_pretender(self, request_id: int, tokens: int) -> None:
        """One block stands for a whole table."""
        sequence = self.open(request_id)
        sequence.pretends = True
        sequence.table = self.blocks.take(1) * ceil_div(tokens, self.tokens_per_block)

    def growth(self, sequence: KVSequence | None, cached: int, tokens: int) -> BlocksDelta:
        """Blocks to take so that ``tokens`` have a place, ``cached`` of them from before; less those that fall out of
        the window first."""
        held = len(sequence.table) if sequence else 0
        blocks = ceil_div(tokens, self.tokens_per_block)
        if self.window_tokens is None:
            return BlocksDelta(max(0, blocks - held))
        leaving = self.front_removed(cached) - sequence.returned if sequence else 0
        return BlocksDelta(max(0, blocks - held) - max(0, min(leaving, held)))

    def grow(self, sequence: KVSequence, request: Request, tokens: int) -> None:
        """Have a place for ``tokens``. ``CapacityError`` with nothing changed when there are too few blocks."""
        wanted = ceil_div(tokens, self.tokens_per_block) - len(sequence.table)
        if wanted <= 0 and self.window_tokens is None:
            return
        if sequence.pretends:
            sequence.returned = self.front_removed(request.computed_tokens)
            sequence.table += sequence.table[-1:] * max(0, wanted)
            return
        missing = wanted if self.window_tokens is None else self.growth(sequence, request.computed_tokens, tokens)
        if missing > self.blocks.free_blocks:
            raise CapacityError(
                f"request {request.id} needs {missing} more KV blocks for {tokens} tokens, {self.free_blocks} of "
                f"{self.num_blocks} are free",
                request_id=request.id,
                needed=missing,
                free=self.free_blocks,
            )
        if self.window_tokens is not None:
            self.return_front(sequence, request.computed_tokens)
        if wanted > 0:
            sequence.table += self.blocks.take(wanted)

    def return_front(self, sequence: KVSequence, cached: int) -> None:
        """Give back the blocks that fell out of the window behind ``cached`` tokens."""
        if sequence.pretends:
            return
        first = min(self.front_removed(cached), len(sequence.table))
        if first > sequence.returned:
            self.blocks.give_back(sequence.table[sequence.returned : first])
            sequence.table[sequence.returned : first] = [RETURNED] * (first - sequence.returned)
            sequence.returned = first

    def shrink(self, sequence: KVSequence, tokens: int) -> None:
        """Give back private blocks behind the first ``tokens``."""
        keep = max(ceil_div(tokens, self.tokens_per_block), sequence.stored, sequence.returned)
        if not sequence.pretends and keep < len(sequence.table):
            self.blocks.give_back(sequence.table[keep:])
            del sequence.table[keep:]

    def private_blocks(self, sequence: KVSequence) -> list[int]:
        """Blocks that nobody else knows, each once."""
        if sequence.pretends:
            return sequence.table[:1]
        return sequence.table[max(sequence.stored, sequence.returned) :]

    def kept_blocks(self, sequence: KVSequence) -> list[int]:
        """Blocks of a sequence that hold something, shared ones too, first to last."""
        return sequence.table[sequence.returned :]

    def reopen(self, request_id: int, blocks: list[int], returned: int, space: Hashable = None) -> None:
        """A sequence that was away stands on other blocks now, behind those it had returned."""
        sequence = self.open(request_id, space)
        sequence.table = [RETURNED] * returned + blocks
        sequence.returned = returned

    def resize(self, num_blocks: int) -> None:
        """A pool of ``num_blocks``, at least those in use. What sequences hold beyond is copied to blocks that are free
        below; ``AllocationError`` with nothing changed when there is no memory for a larger pool."""
        grows = num_blocks > self.num_blocks
        if grows:
            self.store.resize(num_blocks)
        self.blocks.resize(num_blocks)
        if not grows:
            for sequence in self.sequences.values():
                self._move_below(sequence, num_blocks)
            self.store.resize(num_blocks)

    def _move_below(self, sequence: KVSequence, num_blocks: int) -> None:
        moved = {block: self.blocks.take(1)[0] for block in self.private_blocks(sequence) if block >= num_blocks}
        for source, target in moved.items():
            self.blocks.store.copy_block(source, target)
        if moved:
            sequence.table[:] = [moved.get(block, block) for block in sequence.table]

    def close(self, request_id: int) -> None:
        """Give back what a sequence holds; unknown ones hold nothing."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.blocks.give_back(self.private_blocks(sequence))
            self.blocks.release(sequence.node)


def window_reach_blocks(window_tokens: int, tokens_per_block: int) -> int:
    """Most blocks that ``window_tokens`` tokens in a row touch."""
    return ceil_div(window_tokens - 1, tokens_per_block) + 1


def window_slack_blocks(*, tokens_per_block: int, max_num_tokens: int, max_batch_size: int) -> int:
    """Blocks of a windowed pool that admission leaves alone: prompt pieces are written beside the windows they read,
    and what falls out of a window returns a step later."""
    return ceil_div(max_num_tokens, tokens_per_block) + max_batch_size
