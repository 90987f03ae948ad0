"""vLLM's pool for compressed caches: blocks of several page sizes, shared by groups that use them very differently.

A request holds blocks of the whole context in one group, and in the others of what is in flight: windows, and the
partial sums from which compressed entries are made, in pages of 4 or 8 tokens. That is why a request costs gigabytes
before its context counts. Page sizes, padding and the order of groups were read in the sources of vLLM 0.22.1, 0.24.0,
0.26.0, 0.27.1, 0.28.0 and 0.31.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from onebudget.planner.policies.compressed import CompressedShape
from onebudget.planner.policies.versions import EngineVersion
from onebudget.planner.policies.vllm.groups import Group, GroupPlan
from onebudget.units import MIB, align_up, ceil_div

BLOCK_TOKENS = 256
_ALIGNMENT = 576
_WINDOW_BLOCK = 64
_STATE_BLOCKS = {4: 4, 128: 8}


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that hold blocks together: ``pages`` maps a page's bytes to how many layers have one. ``reach`` None: a
    block of ``block_tokens`` for all of the context; else for ``reach`` tokens before what is in flight."""

    block_tokens: int
    pages: tuple[tuple[int, int], ...]
    reach: int | None = None

    @property
    def bytes(self) -> int:
        return sum(nbytes * count for nbytes, count in self.pages)

    def blocks(self, length: int, in_flight: int) -> int:
        if self.reach is None:
            return ceil_div(length, self.block_tokens)
        return ceil_div(min(self.reach - 1 + in_flight, length), self.block_tokens) + 1


@dataclass(frozen=True, slots=True)
class CompressedPlan:
    """``block_bytes`` of the pool, and ``request_blocks`` that one longest request is counted with."""

    groups: tuple[PageGroup, ...]
    block_bytes: int
    request_blocks: int
    needed_blocks: int

    def as_groups(self) -> GroupPlan:
        """The same for callers that know equal pages only."""
        kinds = tuple(
            Group("full" if group.reach is None else "sliding", sum(n for _, n in group.pages), group.block_tokens,
                  group.reach) for group in self.groups
        )  # fmt: skip
        return GroupPlan(kinds, self.block_bytes, BLOCK_TOKENS)


def plan_compressed(
    shape: CompressedShape,
    head_dim: int,
    version: EngineVersion,
    *,
    length: int,
    batch_tokens: int,
    draft_layers: int = 0,
) -> CompressedPlan:
    """Groups, the price of a block and the blocks of a longest request.

    From 0.26 two batches may be in flight. Until 0.26 a request is counted in bytes of its groups over the bytes of the
    first one, later in blocks.
    """
    groups = _groups(shape, head_dim, draft_layers)
    in_flight = batch_tokens * (2 if version.at_least(0, 26) else 1)
    blocks = [group.blocks(length, in_flight) for group in groups]
    counted = sum(blocks)
    if not version.at_least(0, 27):
        held = sum(count * group.bytes for count, group in zip(blocks, groups, strict=True))
        counted = ceil_div(held, groups[0].bytes)
    return CompressedPlan(groups, _block_bytes(groups, version), max(counted, 1), sum(blocks))


def _groups(shape: CompressedShape, head_dim: int, draft_layers: int) -> tuple[PageGroup, ...]:
    """The context's group first; then windows, split until no group has more layers than fit its slots; then the
    partial sums, with pages padded to those of the first group."""
    fours, many = shape.layers_of(4), shape.layers_of(128)
    wide = _page(_WINDOW_BLOCK * _entry_bytes(head_dim, shape.rope))
    index = _page(BLOCK_TOKENS // 4 * (shape.index_dim + 4))
    sparse = _page(BLOCK_TOKENS // 128 * _entry_bytes(head_dim, shape.rope))
    windows = len(shape.ratios) + draft_layers
    slots = _slots([max(fours, many), windows, fours, many])
    whole = PageGroup(BLOCK_TOKENS, _kept((wide, fours), (index, fours), (sparse, many)))
    shares = [len(range(start, windows, ceil_div(windows, slots))) for start in range(ceil_div(windows, slots))]
    found = [whole, *(PageGroup(_WINDOW_BLOCK, ((wide, share),), shape.window) for share in shares)]
    if fours:
        found.append(PageGroup(_STATE_BLOCKS[4], ((wide, fours), (index, fours)), 2 * 4))
    if many:
        found.append(PageGroup(_STATE_BLOCKS[128], ((wide, many),), 128))
    return tuple(found)


def _entry_bytes(head_dim: int, rope: int) -> int:
    """One entry in 8 bits but for its rotary part in 16, and a scale for every 64 elements in 8 bytes."""
    return head_dim - rope + 2 * rope + 8


def _page(nbytes: int) -> int:
    return align_up(nbytes, _ALIGNMENT)


def _kept(*pages: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(page for page in pages if page[1])


def _slots(counts: list[int]) -> int:
    """Layers per group, at least those of the first count, with the least padding over all; the most where alike."""
    known = [count for count in counts if count]
    padding = {size: sum(-count % size for count in known) for size in range(max(counts[0], 1), max(known) + 1)}
    return max(size for size, pad in padding.items() if pad == min(padding.values()))


def _block_bytes(groups: tuple[PageGroup, ...], version: EngineVersion) -> int:
    """Until 0.23 every page size has as many slots as the most common one, until 0.26 as many as it needs, and from
    0.27 on groups overlap, so that the largest group is a block."""
    if version.at_least(0, 27):
        return max(group.bytes for group in groups)
    slots: dict[int, int] = {}
    for group in groups:
        for nbytes, count in group.pages:
            slots[nbytes] = max(slots.get(nbytes, 0), count)
    if version.at_least(0, 24):
        return sum(nbytes * count for nbytes, count in slots.items())
    return sum(nbytes for nbytes, _ in groups[0].pages) * max(slots.values())


_LOGITS_BYTES = 512 * MIB
_GATHERED_PROMPTS = 4
_INDEX_ROWS = 40
_HEAD_TILE = 64


def profile_bytes_per_token(
    shape: CompressedShape, *, hidden: int, heads: int, head_dim: int, expert_bytes: int
) -> int:
    """Live bytes per token of the profile: residual streams going in and out, and the larger of attention (queries
    and outputs padded to whole tiles of heads, partial sums in 32 bits) and experts."""
    streams = 2 * shape.streams * hidden * 2
    queries = 2 * head_dim * (heads + 2 * align_up(heads, _HEAD_TILE)) + 2 * shape.index_heads * shape.index_dim
    return streams + max(queries + 4 * head_dim * 4 + 4 * hidden, expert_bytes)


def reserved_bytes(shape: CompressedShape, head_dim: int, length: int, batch_tokens: int) -> int:
    """What the profile reserves so that later steps fit: a room shared by the gathered context of four prompts and the
    scorer's keys, and the scorer's logits. Read in the source of 0.26.0."""
    gathered = _GATHERED_PROMPTS * (ceil_div(length, 4) + shape.window + batch_tokens) * head_dim * 2
    keys = _INDEX_ROWS * length // 4 * (shape.index_dim + 4)
    return max(gathered, keys) + _LOGITS_BYTES
