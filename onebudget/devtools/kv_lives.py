"""A store that remembers what was written where, and lives of requests that check every token they would read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.errors import CapacityError
from onebudget.resources.kv.blocks import BlockPool
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.node import Node
from onebudget.resources.kv.tier import BlockTier

Slot = tuple[Any, ...]
"""What a token's K/V depend on: adapter, salt, and all tokens up to it."""


@dataclass
class WrittenStore:
    num_blocks: int
    tokens_per_block: int
    block_bytes: int = 8
    tiers: dict[tuple[str, int], list[Slot | None]] = field(default_factory=dict)
    cleared: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    """Slots of tiers outside memory that give nothing back."""
    step_blocks: int = 1

    def __post_init__(self) -> None:
        self.blocks: list[list[Slot | None]] = [[None] * self.tokens_per_block for _ in range(self.num_blocks)]

    @property
    def allocated_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def resize(self, num_blocks: int) -> None:
        del self.blocks[num_blocks:]
        self.blocks += [[None] * self.tokens_per_block for _ in range(num_blocks - len(self.blocks))]
        self.cleared = {block for block in self.cleared if block < num_blocks}
        self.num_blocks = num_blocks

    def clear_fresh(self, blocks: Sequence[int]) -> None:
        self.cleared.update(blocks)

    def copy_block(self, source: int, target: int) -> None:
        self.blocks[target] = list(self.blocks[source])

    def offload(self, blocks: Sequence[int], tier: BlockTier, slots: Sequence[int]) -> bool:
        for block, slot in zip(blocks, slots, strict=True):
            self.tiers[tier.name, slot] = list(self.blocks[block])
        return True

    def onboard(self, tier: BlockTier, slots: Sequence[int], blocks: Sequence[int]) -> int:
        for done, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
            if slot in self.lost and not tier.in_memory:
                self.lost.discard(slot)
                return done
            self.blocks[block] = list(self.tiers[tier.name, slot])
        return len(slots)

    def release(self) -> None:
        pass


@dataclass
class MovingTier:
    """A tier whose contents travel with ``read`` and ``write``."""

    name: str
    num_slots: int
    store: WrittenStore
    in_memory: bool = True
    full_after: int = 10**9

    def row(self, slot: int) -> Any:
        raise NotImplementedError

    def read(self, slot: int) -> Any:
        return self.store.tiers[self.name, slot]

    def write(self, slot: int, data: Any) -> bool:
        self.full_after -= 1
        if self.full_after < 0:
            return False
        self.store.tiers[self.name, slot] = list(data)
        return True

    def discard(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.store.tiers.pop((self.name, slot), None)

    def release(self) -> None:
        pass


def text_up_to(request: Request, position: int) -> Slot:
    tokens = (*request.prompt_token_ids, *request.output_token_ids)[: position + 1]
    media = tuple(digest for at, digest in request.media_digests if at <= position)
    return (request.adapter_id, request.cache_salt, media, tokens)


class Lives:
    """Drives one manager over random requests; ``store`` of each group knows what was written."""

    def __init__(self, kv: KVCacheManager, *, seed: int, max_prompt: int = 30, vocabulary: int = 2) -> None:
        self.kv = kv
        self.random = random.Random(seed)
        self.running: list[Request] = []
        self.suspended: list[Request] = []
        self.pins: list[int] = []
        self.started = 0
        self.computed = 0
        self._max_prompt = max_prompt
        self._vocabulary = vocabulary

    def start(self) -> None:
        choose = self.random
        length = choose.randint(1, self._max_prompt)
        tokens = [choose.randrange(self._vocabulary) for _ in range(length)]
        media = ((choose.randrange(length), choose.choice("xy")),) if choose.random() < 0.1 else ()
        request = Request(
            self.started, tokens, SamplingParams(), max_new_tokens=choose.randint(1, 12),
            adapter_id=choose.choice([None, None, None, 1]), cache_salt=choose.choice([None, None, None, "s"]),
            media_digests=media,
        )  # fmt: skip
        request.state = RequestState.CONTEXT
        self.started += 1
        self.running.append(request)

    def step(self) -> None:
        """Compute a random part of those that run."""
        chosen = [request for request in self.running if self.random.random() < 0.7]
        batch = ScheduledBatch()
        for request in chosen:
            left = max(1, request.context_tokens - request.computed_tokens)
            request.chunk_tokens = min(left, self.random.randint(1, 12))
            batch.add(request)
        while batch.size:
            try:
                self.kv.prepare(batch)
                break
            except CapacityError as error:
                failed = next(request for request in chosen if request.id == error.request_id)
                chosen.remove(failed)
                self.pause(failed)
                generation = [one for one in chosen if one.state is RequestState.GENERATION]
                batch = ScheduledBatch(generation=generation)
                batch.rebin([one for one in chosen if one.state is RequestState.CONTEXT])
        self._trim(batch)
        for request in batch.requests:
            self._compute(request)
        self.kv.update(batch)
        for request in batch.requests:
            if len(request.output_token_ids) >= request.max_new_tokens:
                request.finish("length")
                self.end(request)
        self.check()

    def _trim(self, batch: ScheduledBatch) -> None:
        """Postpone some of what was prepared, as fitting a step's tokens does."""
        for request in batch.context:
            if self.random.random() < 0.2:
                request.chunk_tokens = self.random.randint(1, request.chunk_tokens)
        batch.rebin()

    def _compute(self, request: Request) -> None:
        size, tokens = self.kv.tokens_per_block, len(request.tokens_of_step())
        reached = request.computed_tokens + tokens
        for group in self.kv.groups:
            table, written = group.block_table(request), group.store.blocks  # type: ignore[attr-defined]
            first = max(0, request.computed_tokens - group.window_tokens + 1) if group.window_tokens else 0
            for position in range(first, request.computed_tokens):
                found = written[table[position // size]][position % size]
                assert found == text_up_to(request, position), (request.id, position)
            for position in range(request.computed_tokens, reached):
                written[table[position // size]][position % size] = text_up_to(request, position)
        self.computed += tokens
        request.computed_tokens = reached
        if request.computed_tokens >= request.context_tokens:
            request.state = RequestState.GENERATION
            request.output_token_ids.append(self.random.randrange(self._vocabulary))

    def pause(self, request: Request) -> None:
        self.kv.free(request)
        request.pause()
        request.state = RequestState.CONTEXT

    def end(self, request: Request) -> None:
        self.running.remove(request)
        pins = self.kv.free(request, pin_on_release=self.random.random() < 0.2)
        self.pins += pins
        if self.random.random() < 0.2:
            self.kv.free(request)

    def any_running(self) -> Request | None:
        return self.random.choice(self.running) if self.running else None

    def cancel(self) -> None:
        request = self.any_running()
        if request is not None:
            request.finish("cancelled")
            self.end(request)

    def pause_one(self) -> None:
        request = self.any_running()
        if request is not None:
            self.pause(request)

    def suspend_one(self) -> None:
        request = self.any_running()
        if request is not None and self.kv.suspend(request):
            self.running.remove(request)
            self.suspended.append(request)

    def resume_one(self) -> None:
        if self.suspended and self.kv.resume(self.suspended[0]):
            self.running.append(self.suspended.pop(0))

    def unpin(self) -> None:
        if self.pins:
            self.kv.unpin(self.pins.pop())

    def finish(self) -> None:
        for request in [*self.running, *self.suspended]:
            request.finish("cancelled")
            self.kv.free(request)
        while self.pins:
            self.unpin()
        self.running.clear()
        self.suspended.clear()
        self.check()

    def check(self) -> None:
        for group in self.kv.groups:
            check_books(group.blocks, [group.kept_blocks(one) for one in group.sequences.values() if not one.pretends])


def nodes_of(pool: BlockPool) -> list[Node]:
    found = [child for root in pool.tree.roots() for child in root.children.values()]
    for node in found:
        found += node.children.values()
    return found


def check_books(pool: BlockPool, tables: list[list[int]]) -> None:
    """Every block is in one place, every slot too, and the order of eviction starts at the ends of texts."""
    assert pool.free_blocks + pool.used_blocks == pool.num_blocks
    nodes = nodes_of(pool)
    in_tree = [block for node in nodes for block in node.blocks[: node.device_end]]
    assert len(in_tree) == len(set(in_tree))
    unused = set(pool._recycled) | set(range(pool._next_fresh, pool.num_blocks))
    assert len(unused) == len(pool._recycled) + pool.num_blocks - pool._next_fresh
    assert not unused & set(in_tree)
    for table in tables:
        assert not unused & set(table)
        assert len(table) == len(set(table))
    listed = [node for queue in pool.order._queues.values() for node in queue]
    assert sum(node.device_end for node in listed) == pool.evictable_blocks
    seen: set[int] = set()
    for priority in sorted(pool.order._queues):
        for node in pool.order._queues[priority]:
            assert not node.held and node.device_end
            assert all(id(child) in seen or not child.device_end for child in node.children.values())
            seen.add(id(node))
    for node in nodes:
        assert 0 <= node.device_end <= node.near_end <= len(node.blocks) and node.blocks
        assert node.held == 0 or node.device_end == len(node.blocks)
        if node.device_end < len(node.blocks):
            assert all(not child.device_end for child in node.children.values())
        if not node.held and node.device_end:
            assert node in pool.order
    if pool.spill is not None:
        near = [slot for node in nodes for slot in node.blocks[node.device_end : node.near_end]]
        far = [slot for node in nodes for slot in node.blocks[node.near_end :]]
        assert len(near) == len(set(near)) and len(far) == len(set(far))
        assert not set(near) & set(pool.spill.near._recycled)
        assert set(pool.spill.near.order._queues) <= set(range(101))
        for node in nodes:
            assert (node in pool.spill.near.order) == (node.near_end > node.device_end and not node.held)
        if pool.spill.far is not None:
            assert pool.spill.far.used_slots == len(far)
        else:
            assert not far
