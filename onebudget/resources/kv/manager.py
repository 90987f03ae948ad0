"""The paged KV cache manager: block tables per sequence over pools of equal blocks, one pool per attention window."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from onebudget.core import Request, RequestState
from onebudget.errors import ConfigError, StateError
from onebudget.resources.base import BaseResourceManager
from onebudget.resources.kv.counters import KVCounters
from onebudget.resources.kv.counting import blocks_to_completion
from onebudget.resources.kv.dummies import add_dummies
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.helix import HelixRank, check_helix
from onebudget.resources.kv.reuse import PrefixReuse
from onebudget.resources.units import BlocksDelta, BlocksTotal
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import ScheduledBatch
    from onebudget.resources.kv.blocks import Claim
    from onebudget.resources.kv.node import Node
    from onebudget.resources.kv.pool import KVPool
    from onebudget.resources.kv.store import KVStore

__all__ = ["KVCacheManager", "blocks_to_completion"]


@dataclass(slots=True)
class _Pin:
    group: KVGroup
    node: Node
    private: list[int]


class KVCacheManager(BaseResourceManager):
    """Blocks are taken as tokens are computed; admission counts to completion, so taking never fails in service.

    With ``reuse`` the full blocks of a sequence stay readable after it, and a later request that starts with the same
    tokens begins behind them; with ``partial_reuse`` also behind the equal tokens of the first block that differs,
    which is copied. Where layers attend to a window only, front blocks are returned as they leave it, and nothing is
    reused. Dummies neither reuse nor are reused.

    Several groups are counted together. Counts to completion are a request's share of the pool where that is largest,
    in blocks of the pool that attends to all, so that what fits by them fits in every pool.

    ``probe_lengths`` are the prompt lengths of the profile's batches when this manager serves the profile.
    ``attended_tokens_cap``: cached and computed prompt tokens that the prompts of one step may attend to together;
    None is no cap, 0 lets one prompt in. Every sequence has room for ``extra_kv_tokens`` and ``draft_reserve_tokens``
    beside its own tokens. ``recurrent``: the model keeps states that this manager does not count.

    With ``helix`` this is the cache of one rank: callers speak of whole sequences, blocks are those of the rank's own
    tokens. Nothing is reused then, because a rank's blocks alone don't tell the text they belong to.
    """

    def __init__(
        self,
        groups: KVStore | KVGroup | Sequence[KVGroup],
        *,
        reuse: bool = False,
        partial_reuse: bool = True,
        probe_lengths: Sequence[Sequence[int]] = (),
        attended_tokens_cap: int | None = None,
        extra_kv_tokens: int = 0,
        draft_reserve_tokens: int = 0,
        beam_width: int = 1,
        recurrent: bool = False,
        helix: HelixRank | None = None,
        counters: KVCounters | None = None,
    ) -> None:
        """``groups``: or the store of a single group of all layers. ``counters`` are those its groups were given.

        ``ConfigError`` for ``helix`` over windows: which blocks leave one would depend on other ranks.
        """
        self.counters = counters or KVCounters()
        self.groups = _as_groups(groups, self.counters)
        self.tokens_per_block = self.groups[0].tokens_per_block
        self._only = self.groups[0] if len(self.groups) == 1 else None
        self._counted = [group for group in self.groups if not group.serves_any_batch] or [self.groups[0]]
        self._windowed = [group for group in self.groups if group.window_tokens is not None]
        if helix is not None:
            check_helix(self.groups, reuse=reuse)
        self.helix = helix
        full = [group for group in self.groups if group.window_tokens is None]
        self._unit = full[0] if full else max(self.groups, key=lambda group: group.capacity)
        self._probe_lengths = probe_lengths
        self.attended_tokens_cap = attended_tokens_cap
        self._prefixes = PrefixReuse(
            self.groups[0],
            enabled=reuse and helix is None and self._only is not None and self._only.window_tokens is None,
            partial=partial_reuse,
            counters=self.counters,
        )
        self._extra = extra_kv_tokens
        self._draft_reserve = draft_reserve_tokens
        self._beam_width = beam_width
        self._recurrent = recurrent
        self._pins: dict[int, _Pin] = {}
        self._next_pin = 0

    @property
    def peak_used_blocks(self) -> int:
        """Most blocks of the pool that counts which sequences held at once."""
        return self._unit.peak_used_blocks

    @property
    def peak_used_bytes(self) -> int:
        return sum(group.peak_used_blocks * group.store.block_bytes for group in self.groups)

    def reset_peaks(self) -> None:
        for group in self.groups:
            group.peak_used_blocks = group.used_blocks

    @property
    def allocated_bytes(self) -> int:
        """Device bytes of all pools."""
        return sum(group.store.allocated_bytes for group in self.groups)

    @property
    def pools(self) -> list[KVPool]:
        """The device memory of each group."""
        return [cast("KVPool", group.store) for group in self.groups]

    @property
    def pool(self) -> KVPool:
        """Of the first group."""
        return self.pools[0]

    @property
    def reuses(self) -> bool:
        return self._prefixes.enabled

    # Counts

    def max_resource_count(self) -> BlocksTotal:
        return self._unit.capacity

    @property
    def free_blocks(self) -> int:
        """Blocks that every pool can give: no sequence takes more of one than of the one that attends to all."""
        if self._only is not None:
            return self._only.blocks.free_blocks
        return min(group.free_blocks for group in self._counted)

    @property
    def used_blocks(self) -> int:
        if self._only is not None:
            return self._only.used_blocks
        return max(0, self.max_resource_count() - self.free_blocks)

    def needed_to_completion(self, request: Request) -> BlocksTotal:
        if request.pretended_tokens:
            return BlocksTotal(1)
        prompt, new = request.prompt_tokens, request.max_new_tokens
        if self.helix is not None:
            prompt, new = self.helix.shares(request, new, self.tokens_per_block)
        if self._only is not None and self._only.window_tokens is None:
            return blocks_to_completion(prompt, new, self.tokens_per_block)
        return BlocksTotal(self._scaled([group.blocks_at_end(prompt + new) for group in self.groups]))

    def growth(self, request: Request, tokens: int) -> BlocksDelta:
        """Blocks the request lacks to have a place for ``tokens``."""
        if request.pretended_tokens:
            return BlocksDelta(0)
        if self.helix is not None:
            tokens = self.helix.local_tokens(request, tokens, self.tokens_per_block)
        return max(
            group.growth(group.sequences.get(request.id), request.computed_tokens, tokens) for group in self.groups
        )

    def _scaled(self, blocks: Sequence[int]) -> int:
        """The largest share of a pool, in blocks of the one that counts."""
        if self._only is not None:
            return blocks[0]
        most = self.max_resource_count()
        shares = [
            ceil_div(count * most, max(1, group.capacity))
            for count, group in zip(blocks, self.groups, strict=True)
            if group in self._counted
        ]
        return max(shares)

    def kv_block_budget_applies(self) -> bool:
        """Exact for full attention alone: whoever can't tell exactly must not refuse."""
        return type(self) is KVCacheManager and self._counts_exactly

    @property
    def _counts_exactly(self) -> bool:
        return self._only is not None and self._only.window_tokens is None and not self._recurrent

    def request_kv_block_budget(self, request: Request) -> tuple[BlocksTotal, BlocksTotal] | None:
        if not self.kv_block_budget_applies():
            return None
        prompt, new = request.prompt_tokens, request.max_new_tokens + self._extra + self._draft_reserve
        if self.helix is not None:
            prompt, new = self.helix.shares(request, new, self.tokens_per_block)
        required = blocks_to_completion(prompt, new, self.tokens_per_block, self._beam_width)
        return required, self.groups[0].capacity

    # Prefixes

    def reusable_tokens(self, request: Request) -> int:
        """What ``begin`` would return now, whole blocks of it; nothing is held."""
        if request.pretended_tokens:
            return request.pretended_tokens
        return self._prefixes.findable_blocks(request) * self.tokens_per_block

    def first_new_block_key(self, request: Request) -> Hashable | None:
        """Names the first full block that the request computes itself, or would; None when there is none.

        A request that waits and one that runs have the same key where the first would find that block once the second
        has stored it.
        """
        return self._prefixes.first_new_block_key(request)

    def begin(self, request: Request) -> int:
        """Hold the kept blocks this request starts with; returns their tokens, which need no computing."""
        return self.begin_all([request])[0]

    def begin_all(self, requests: Sequence[Request]) -> list[int]:
        """Begin several requests: all claim what they reuse first, then it is brought to the device, so that no room
        is made at the cost of another's prefix."""
        claims: dict[int, Claim] = {}
        for request in requests:
            request.begun = True
            if request.pretended_tokens:
                for group in self.groups:
                    group.open_pretender(request.id, request.pretended_tokens)
            elif self._prefixes.findable_bytes(request):
                claims[request.id] = self._prefixes.claim(request)
            else:
                for group in self.groups:
                    group.open(request.id, self._prefixes.space(request))
        if claims:
            self.groups[0].blocks.onboard(list(claims.values()))
        return [
            self._prefixes.open(request, claims[request.id]) if request.id in claims else request.pretended_tokens
            for request in requests
        ]

    # Hooks

    def prepare(self, batch: ScheduledBatch) -> None:
        """Return what left its window, begin requests that are new, and have a place for every token of the step.

        ``CapacityError`` names the first request that finds none; what the others got stays theirs.
        """
        self._return_fronts(batch)
        sequences = self.groups[0].sequences
        new = [request for request in batch.context if request.id not in sequences]
        if new:
            self._begin_in_batch(new)
            batch.rebin()
        ahead = 1 + self._extra
        if len(self.groups) == 1:
            self._prepare_group(self.groups[0], batch, ahead)
        else:
            for group in self.groups:
                self._prepare_group(group, batch, ahead)

    def _return_fronts(self, batch: ScheduledBatch) -> None:
        for group in self._windowed:
            for request in batch.requests:
                sequence = group.sequences.get(request.id)
                if sequence is not None:
                    group.return_front(sequence, request.computed_tokens)

    def _begin_in_batch(self, requests: Sequence[Request]) -> None:
        """A last chunk stays one whatever was reused; others keep their length."""
        to_end = [
            max(request.computed_tokens, request.reusable_estimate) + request.chunk_tokens >= request.context_tokens
            for request in requests
        ]
        for request, reused, last in zip(requests, self.begin_all(requests), to_end, strict=True):
            request.computed_tokens = reused
            left = request.context_tokens - reused
            request.chunk_tokens = left if last else min(request.chunk_tokens, left)

    def _prepare_group(self, group: KVGroup, batch: ScheduledBatch, ahead: int) -> None:
        sequences, size, full = group.sequences, group.tokens_per_block, group.window_tokens is None
        reserve, helix = self._draft_reserve, self.helix
        for request in batch.context:
            tokens = request.computed_tokens + request.chunk_tokens
            if request.is_last_chunk:
                tokens += self._extra + reserve
            if helix is not None:
                tokens = helix.local_tokens(request, tokens, size)
            group.grow(sequences[request.id], request, tokens)
        for request in batch.generation:
            sequence = sequences.get(request.id)
            if sequence is None:
                raise StateError(f"request {request.id} generates but holds no KV blocks")
            tokens = request.computed_tokens + ahead + max(len(request.draft_tokens), reserve)
            if tokens > len(sequence.table) * size or not full:
                if helix is not None:
                    tokens = helix.local_tokens(request, tokens, size)
                group.grow(sequence, request, tokens)
        group.note_peak()

    def resize(self, request: Request, tokens: int) -> bool:
        """Have a place for ``tokens`` now; False, with nothing taken, when a pool has too few blocks."""
        if self.helix is not None:
            tokens = self.helix.local_tokens(request, tokens, self.tokens_per_block)
        if not self._has_room(request, tokens):
            return False
        for group in self.groups:
            sequence = group.sequences.get(request.id) or group.open(request.id, self._prefixes.space(request))
            group.grow(sequence, request, tokens)
        return True

    def _has_room(self, request: Request, tokens: int) -> bool:
        return all(
            group.growth(group.sequences.get(request.id), request.computed_tokens, tokens) <= group.free_blocks
            for group in self.groups
        )

    def update(self, batch: ScheduledBatch, attn_meta: object = None, kv_elem_bytes: int | None = None) -> None:
        """Take rejected drafts and what left its window back, and keep the blocks of prompts that are computed
        altogether."""
        self._return_fronts(batch)
        for request in batch.generation:
            if request.rewind_tokens:
                self._rewind(request)
        for request in batch.context_last:
            if request.state is not RequestState.WAITING and not request.finished:
                self._prefixes.store(request)

    def _rewind(self, request: Request) -> None:
        tokens = request.computed_tokens + 1 + self._extra + self._draft_reserve
        if self.helix is not None:
            tokens = self.helix.local_tokens(request, tokens, self.tokens_per_block)
        for group in self.groups:
            sequence = group.sequences.get(request.id)
            if sequence is not None:
                group.shrink(sequence, tokens)

    def free(self, request: Request, pin_on_release: bool = False) -> list[int]:
        """Let go of what the request holds. Full blocks stay reusable, until somebody needs the room.

        With ``pin_on_release`` they, and the rest of the table too, stay where they are until ``unpin`` of the handles
        that are returned.
        """
        self._prefixes.store(request)
        pins = self._pin(request) if pin_on_release else []
        for group in self.groups:
            group.close(request.id)
        self._prefixes.forget(request)
        request.begun = False
        return pins

    def _pin(self, request: Request) -> list[int]:
        pins = []
        for group in self.groups:
            sequence = group.sequences.pop(request.id, None)
            if sequence is not None:
                pins.append(self._next_pin)
                self._pins[self._next_pin] = _Pin(group, sequence.node, group.private_blocks(sequence))
                self._next_pin += 1
        return pins

    def unpin(self, pin: int) -> None:
        """Blocks of a pin may be reused and evicted again. ``StateError`` for one that is no longer, or never was."""
        held = self._pins.pop(pin, None)
        if held is None:
            raise StateError(f"pin {pin} is not held: it was released before, or never given out")
        held.group.blocks.give_back(held.private)
        held.group.blocks.release(held.node)

    # Suspension: this manager has nowhere to keep a sequence

    def suspend(self, request: Request) -> bool:
        """Keep a sequence outside the device; False when that is impossible, with nothing changed."""
        return False

    def resume(self, request: Request) -> bool:
        """Bring a suspended sequence back; False when there is no room, or when it is lost."""
        return False

    # Dummies

    def dummy_lengths(self) -> Sequence[Sequence[int]]:
        return self._probe_lengths

    def add_dummy_requests(
        self,
        ids: Sequence[int],
        *,
        tokens: int | None = None,
        generation: bool = False,
        draft_tokens: int = 0,
        helix: bool | None = None,
        draft: KVCacheManager | None = None,
        **shape: Any,
    ) -> list[Request] | None:
        """Sequences of ``tokens`` each, here and in the manager of the draft model; by default one token and the
        drafts, two at least under ``helix`` (None: as the manager is). One for generation has its last token still to
        compute.

        None when there is no free block. Any failure on the way removes all of them again, here and there.
        """
        if shape:
            raise ConfigError.for_field("shape", sorted(shape), "tokens, generation, draft_tokens, helix or draft")
        if not self.free_blocks:
            return None
        two = self.helix is not None if helix is None else helix
        length = tokens or max(1 + draft_tokens, 2 if two else 1)
        return add_dummies([self] if draft is None else [self, draft], ids, length, generation=generation)

    # Tables and life of the pools

    def block_table(self, request: Request) -> list[int]:
        """Of the first group."""
        return self.groups[0].block_table(request)

    def front_removed(self, request: Request, window_tokens: int | None = None) -> int:
        """Blocks of the request that left the window and were returned. With several windows one has to be named."""
        return self._group(window_tokens).first_block(request)

    def _group(self, window_tokens: int | None) -> KVGroup:
        if window_tokens is None and self._only is not None:
            return self._only
        for group in self.groups:
            if window_tokens is not None and group.window_tokens == window_tokens:
                return group
        windows = ", ".join(str(group.window_tokens) for group in self.groups)
        raise ConfigError.for_field("window_tokens", window_tokens, f"one of the cache's windows: {windows}")

    def reset_reuse(self) -> None:
        """Forget every kept prefix, because the pool's contents are gone."""
        for group in self.groups:
            group.blocks.reset_reuse()
            group.blocks.forget_contents()

    def shutdown(self) -> None:
        for group in self.groups:
            group.sequences.clear()
            if group.blocks.spill is not None:
                group.blocks.spill.release()
            group.store.release()


def _as_groups(groups: KVStore | KVGroup | Sequence[KVGroup], counters: KVCounters) -> tuple[KVGroup, ...]:
    if isinstance(groups, KVGroup):
        return (groups,)
    if isinstance(groups, Sequence):
        return tuple(groups)
    return (KVGroup(groups, layers=range(getattr(groups, "num_layers", 0)), counters=counters),)
