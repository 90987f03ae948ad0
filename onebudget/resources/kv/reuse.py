"""Prefixes of one group: what a request finds of them, claims, and leaves behind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from onebudget.resources.kv.keys import PrefixKeys
from onebudget.resources.kv.node import DEFAULT_PRIORITY, TOKEN_BYTES
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.resources.kv.blocks import Claim
    from onebudget.resources.kv.counters import KVCounters
    from onebudget.resources.kv.group import KVGroup, KVSequence
    from onebudget.resources.kv.radix import Match


class PrefixReuse:
    """``enabled``: whether blocks are kept and found; ``partial``: whether the equal tokens of the first block that
    differs are copied."""

    def __init__(self, group: KVGroup, *, enabled: bool, partial: bool, counters: KVCounters) -> None:
        self.enabled = enabled
        self._group = group
        self._partial = partial
        self._counters = counters
        self._keys = PrefixKeys()
        self._first_new: dict[int, int] = {}
        self._first_keys: dict[int, tuple[int, Hashable]] = {}

    def space(self, request: Request) -> Hashable:
        return self._keys.space(request)

    def findable_bytes(self, request: Request) -> int:
        """Bytes of the key that may be found in the tree: at least the last token is computed, because its logits are
        wanted; log-probabilities of a prompt need all of it computed."""
        if not self.enabled or request.is_dummy or request.params.prompt_logprobs is not None:
            return 0
        return (request.context_tokens - 1) * TOKEN_BYTES

    def _match(self, request: Request) -> Match:
        tree = self._group.blocks.tree
        end = self.findable_bytes(request)
        key = self._keys.of(request, request.context_tokens)
        return tree.match(tree.root(self._keys.space(request)), key, end - end % tree.block_bytes)

    def findable_blocks(self, request: Request) -> int:
        """Whole blocks that a claim would hold now; nothing is held."""
        return self._match(request).blocks if self.findable_bytes(request) else 0

    def first_new_block_key(self, request: Request) -> Hashable | None:
        """Names the first full block that the request computes itself, or would; None when there is none."""
        end = self.findable_bytes(request)
        if not end:
            return None
        blocks = self._first_new.get(request.id)
        if blocks is None:
            blocks = self.findable_blocks(request)
        known = self._first_keys.get(request.id)
        if known is not None and known[0] == blocks:
            return known[1]
        stop = (blocks + 1) * self._group.blocks.tree.block_bytes
        if stop > end + TOKEN_BYTES:
            return None
        key = self._keys.space(request), self._keys.of(request, request.context_tokens)[:stop]
        self._first_keys[request.id] = blocks, key
        return key

    def claim(self, request: Request) -> Claim:
        """Hold what the request finds; the caller brings it to the device and opens a sequence of it."""
        blocks = self._group.blocks
        return blocks.claim(self._match(request), blocks.tree.root(self._keys.space(request)))

    def open(self, request: Request, claim: Claim) -> int:
        """Open a sequence of a claim that is on the device; returns the tokens it begins behind."""
        sequence = self._group.open_claimed(request.id, claim)
        size, reused = self._group.tokens_per_block, len(sequence.table)
        self._first_new[request.id] = reused
        tokens = reused * size
        if self._partial:
            tokens += self._copy_partial(request, sequence)
        self._counters.reused += reused
        self._counters.missed += ceil_div(request.context_tokens, size) - reused
        self._counters.reused_tokens += tokens
        return tokens

    def _copy_partial(self, request: Request, sequence: KVSequence) -> int:
        """Tokens of one more block that could be copied from one with another end."""
        blocks, end = self._group.blocks, self.findable_bytes(request)
        key = self._keys.of(request, request.context_tokens)
        size = blocks.tree.block_bytes
        start = sequence.stored * size
        match = blocks.tree.match(sequence.node, key, min(start + size, end - end % size), start)
        if match.blocks:
            return 0  # the claim was shortened
        found = blocks.tree.partial(match, sequence.node, key[start:], end - start)
        if found is None or not blocks.free_blocks:
            return 0
        node, index, tokens = found
        source = node.blocks[index]
        target = blocks.take(1)
        if index >= node.device_end or node.blocks[index] != source:  # it was evicted to make room for its copy
            blocks.give_back(target)
            return 0
        blocks.store.copy_block(source, target[0])
        sequence.table += target
        self._counters.partial_copies += 1
        return tokens

    def store(self, request: Request) -> None:
        """Keep what stands in the cache by now; a finished sequence's own tokens too."""
        if not self.enabled or request.is_dummy or request.finish_reason == "error":
            return
        sequence = self._group.sequences.get(request.id)
        if sequence is None:
            return
        tokens = min(request.computed_tokens, request.total_tokens)
        full = min(tokens // self._group.tokens_per_block, len(sequence.table))
        if full > sequence.stored:
            key = self._keys.of(request, tokens)
            sequence.node = self._group.blocks.insert(
                sequence.node, key, sequence.stored, sequence.table, full, DEFAULT_PRIORITY
            )
            sequence.stored = full

    def forget(self, request: Request) -> None:
        """The request is gone; what it left in the tree is not."""
        self._keys.forget(request)
        self._first_new.pop(request.id, None)
        self._first_keys.pop(request.id, None)
