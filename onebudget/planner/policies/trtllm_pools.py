"""TensorRT-LLM's pools: one for each attention window, sized by either KV cache manager.

The first manager gives every window an equal share of the bytes, shortens windows that exceed their pool, and with the
longest of them the longest request. For the second one windowed layers are a fixed part of every request, and layers
that keep everything share the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onebudget.budget.ledger import KVGroup
from onebudget.budget.windows import window_blocks
from onebudget.errors import ConfigError
from onebudget.planner.policies.ledgers import Pool
from onebudget.planner.policies.trtllm_drafts import target_share
from onebudget.planner.policies.vllm.groups import CachedLayer
from onebudget.units import align_up, ceil_div, format_bytes

MANAGERS = ("v1", "v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPools:
    """Layers of one rank by how far back they look. ``bytes_per_token`` and ``layers``: of all layers with a window in
    tokens; ``longest`` tokens is the window of those that keep everything. ``drafted_bytes``: per token of a draft
    with a manager of its own."""

    bytes_per_token: Mapping[int, int]
    layers: Mapping[int, int]
    longest: int
    block_tokens: int
    max_batch_size: int
    state_bytes: int = 0
    drafted_bytes: int = 0
    v2: bool = False

    @property
    def slope(self) -> int:
        """Bytes that one more token takes in the pools that grow with it."""
        if self.v2:
            return self.full_bytes + self.drafted_bytes
        return max(sum(self.bytes_per_token.values()) + self.drafted_bytes, 1)

    @property
    def full_bytes(self) -> int:
        return self.bytes_per_token.get(self.longest, 0)

    @property
    def request_fixed_bytes(self) -> int:
        """What the windowed layers of one request hold at most, in whole blocks."""
        windows = self.bytes_per_token.items()
        return sum(align_up(window, self.block_tokens) * each for window, each in windows if window < self.longest)

    @property
    def request_bytes(self) -> int:
        """A longest request over all pools."""
        return self.request_fixed_bytes + align_up(self.longest, self.block_tokens) * self.full_bytes

    @property
    def needed_bytes(self) -> int:
        """The least the manager starts with: a block in every pool."""
        if self.v2:
            return self.state_bytes + self.request_fixed_bytes + self.block_tokens * self.slope
        if not self.has_windows:
            return self.state_bytes + self.block_tokens * self.slope
        widest = max(self.bytes_per_token.values(), default=0)
        return self.state_bytes + len(self.bytes_per_token) * self.block_tokens * widest

    @property
    def has_windows(self) -> bool:
        return any(window < self.longest for window in self.bytes_per_token)

    def seats(self, nbytes: int) -> int:
        """Requests whose windows the second manager has room for: as many longest ones as fit, at least one."""
        return min(max(self._usable(nbytes) // max(self.request_bytes, 1), 1), self.max_batch_size)

    def fixed_bytes(self, nbytes: int) -> int:
        """What does not grow with tokens: states, and windows of as many requests as there are seats."""
        return self.state_bytes + (self.seats(nbytes) * self.request_fixed_bytes if self.v2 else 0)

    def bytes_for(self, tokens: int) -> int:
        """The pool of a cap in tokens, in whole blocks."""
        tokens = align_up(tokens, self.block_tokens)
        if not self.v2:
            return tokens * self.slope
        seats = tokens // align_up(self.longest, self.block_tokens)
        seats = min(max(seats, 1), self.max_batch_size)
        return self.state_bytes + seats * self.request_fixed_bytes + tokens * self.slope

    def blocks(self, nbytes: int) -> dict[int, int]:
        """Blocks by window."""
        usable = self._usable(nbytes)
        if self.v2:
            return self._second_blocks(nbytes, usable)
        if len(self.bytes_per_token) > 1:
            return window_blocks(usable, self.bytes_per_token, self.block_tokens)
        tokens = max(nbytes - self.state_bytes, 0) // self.slope
        return {max(self.bytes_per_token, default=self.longest): ceil_div(tokens, self.block_tokens)}

    def _second_blocks(self, nbytes: int, usable: int) -> dict[int, int]:
        seats, block = self.seats(nbytes), self.block_tokens
        windows = {window: seats * ceil_div(window, block) for window in self.bytes_per_token if window < self.longest}
        if not self.full_bytes:
            return windows
        rest = max(usable - seats * self.request_fixed_bytes, 0)
        return windows | {self.longest: rest // (self.full_bytes * block)}

    def _usable(self, nbytes: int) -> int:
        """Bytes of the model's own manager."""
        model = sum(self.bytes_per_token.values())
        return target_share(max(nbytes - self.state_bytes, 0), model, self.drafted_bytes)

    def concurrency(self, nbytes: int) -> float:
        """Longest requests at once: the pool that runs out first decides."""
        if self.v2:
            return self._usable(nbytes) / self.request_bytes if self.request_bytes else float(self.max_batch_size)
        blocks = self.blocks(nbytes)
        if not self.has_windows:
            return blocks[max(blocks)] * self.block_tokens / self.longest
        return min(count / ceil_div(window, self.block_tokens) for window, count in blocks.items())

    def tokens(self, nbytes: int) -> int:
        """Tokens of the pool that looks back furthest; where all layers are windowed, those of the requests at once."""
        blocks = self.blocks(nbytes)
        if self.v2 and not self.full_bytes:
            return min(self._usable(nbytes) // max(self.request_bytes, 1), self.max_batch_size) * self.longest
        return blocks[max(blocks)] * self.block_tokens

    def groups(self, nbytes: int) -> Iterable[KVGroup]:
        if not self.has_windows:
            return
        for window, count in sorted(self.blocks(nbytes).items(), reverse=True):
            each, full = self.bytes_per_token[window], window == self.longest
            name = "full" if full else f"window {window}"
            nbytes_of = count * self.block_tokens * each
            yield KVGroup(name, nbytes_of, count, each, None if full else window, self.layers[window])

    def pool(self, nbytes: int) -> Pool:
        """The pool as the ledger wants it, for a cache of about ``nbytes``."""
        return Pool(
            tokens=self.tokens,
            blocks=lambda size: self.tokens(size) // self.block_tokens,
            tokens_per_block=self.block_tokens,
            bytes_per_token=max(self.slope, 1),
            fixed_bytes=self.fixed_bytes(nbytes),
            concurrency=self.concurrency,
            groups=lambda size: tuple(self.groups(size)),
            needed_bytes=self.needed_bytes,
        )

    def warnings(self, nbytes: int) -> tuple[str, ...]:
        """Windows that the first manager shortens, and the longest request that is left."""
        if self.v2 or nbytes < self.needed_bytes:
            return ()
        held = {window: self._held(count) for window, count in self.blocks(nbytes).items()}
        short = {window: tokens for window, tokens in held.items() if tokens < window}
        said = [f"Attention window {window} is shortened to {tokens} tokens, as its pool is." for window, tokens
                in sorted(short.items()) if window < self.longest]  # fmt: skip
        longest = max(min(window, tokens) for window, tokens in held.items())
        if short and longest < self.longest:
            said.append(f"max_seq_len drops from {self.longest} to {longest}: the pool holds no longer request.")
        return tuple(said)

    def _held(self, blocks: int) -> int:
        """Tokens of one request that fit whatever part of a block it begins in."""
        return max((blocks - 1) * self.block_tokens + 1, 0)

    def notes(self, nbytes: int) -> tuple[str, ...]:
        if not self.has_windows:
            return ()
        if not self.v2:
            return (
                f"v1 gives each of {len(self.bytes_per_token)} windows an equal share of the bytes; the token figure "
                "is of the pool that looks back furthest.",
            )
        return (
            f"v2 keeps {format_bytes(self.request_fixed_bytes)} of windows for a request, counted for "
            f"{self.seats(nbytes)} requests at once; layers that keep everything share the rest.",
        )


def by_window(layers: Sequence[CachedLayer], longest: int, pattern: object = None) -> dict[int, list[CachedLayer]]:
    """Layers that cache tokens, by window. ``pattern``: ``max_attention_window``, repeated from the first layer on; it
    replaces the model's own windows. Raises ``ConfigError`` for a pattern that is none."""
    given = _pattern(pattern)
    found: dict[int, list[CachedLayer]] = {}
    for index, layer in enumerate(layers):
        own = given[index % len(given)] if given else layer.window or longest
        if layer.token_bytes:
            found.setdefault(min(own, longest), []).append(layer)
    return found


def _pattern(value: object) -> list[int]:
    if value is None:
        return []
    given: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    if not given or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in given):
        raise ConfigError.for_field("max_attention_window", value, "a list of windows in tokens, each above 0")
    return given


def is_second(value: object) -> bool:
    """Whether ``kv_cache_manager`` asks for the second manager. ``auto`` is the first, as for most models."""
    word = str(value or "v1").lower()
    if word not in (*MANAGERS, "auto"):
        raise ConfigError.for_field("kv_cache_manager", value, f"{' or '.join(MANAGERS)}")
    return word == "v2"
