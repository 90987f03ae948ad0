"""Which layers share a pool, and how many blocks of the cache's bytes each pool gets. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.budget.cost import CacheCost
from onebudget.budget.ledger import KVGroup as LedgerGroup
from onebudget.budget.slopes import windowed_cost
from onebudget.budget.windows import configured_shares, plan_windows, window_blocks
from onebudget.errors import BudgetError
from onebudget.resources.kv.group import window_reach_blocks, window_slack_blocks

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that look equally far back; ``window_tokens`` None: at everything. ``bytes_per_token`` is what all of them
    cache of one token."""

    window_tokens: int | None
    layers: tuple[int, ...]
    bytes_per_token: int

    @property
    def name(self) -> str:
        return "full" if self.window_tokens is None else f"window {self.window_tokens}"


def group_layers(
    windows: Sequence[int | None], layer_bytes_per_token: int, config: BudgetConfig
) -> tuple[LayerGroup, ...]:
    """Groups of a model whose layers have these windows; those that attend to everything come first.

    ``max_attention_window`` narrows them, layer after layer and repeated. A window that no request reaches the end of
    is none.
    """
    narrowed = config.max_attention_window
    members: dict[int, list[int]] = {}
    for layer, own in enumerate(windows):
        limits = [config.max_seq_len, own or config.max_seq_len]
        if narrowed:
            limits.append(narrowed[layer % len(narrowed)])
        members.setdefault(min(limits), []).append(layer)
    return tuple(
        LayerGroup(
            None if window == config.max_seq_len else window,
            tuple(members[window]),
            layer_bytes_per_token * len(members[window]),
        )
        for window in sorted(members, reverse=True)
    )


def is_plain(groups: Sequence[LayerGroup]) -> bool:
    """Whether all layers attend to everything, so that there is one pool and nothing to divide."""
    return len(groups) == 1 and groups[0].window_tokens is None


def fixed_window_blocks(window_tokens: int, config: BudgetConfig) -> int:
    """Blocks with which a windowed pool serves a full batch whatever its requests do: the reach of each, and what the
    prompt pieces of a step are written to."""
    reach = min(window_reach_blocks(window_tokens, config.tokens_per_block), config.blocks_per_max_request)
    return config.max_batch_size * reach + _slack(config)


def serves_any_batch(group: LayerGroup, config: BudgetConfig) -> bool:
    """Whether the group's pool is one of ``fixed_window_blocks``."""
    return group.window_tokens is not None and config.kv_cache_manager == "v2" and config.pool_ratio is None


def _slack(config: BudgetConfig) -> int:
    return window_slack_blocks(
        tokens_per_block=config.tokens_per_block,
        max_num_tokens=config.max_num_tokens,
        max_batch_size=config.max_batch_size,
    )


def cache_cost(groups: Sequence[LayerGroup], config: BudgetConfig) -> CacheCost:
    """Cost of the cache as its manager divides it: v1 sizes every pool from the tokens, for v2 windowed pools are a
    fixed part and the others grow."""
    if config.kv_cache_manager == "v1" or config.pool_ratio is not None:
        return CacheCost(sum(group.bytes_per_token for group in groups))
    size = config.tokens_per_block
    windowed = [group for group in groups if group.window_tokens is not None]
    plain = windowed_cost(
        full_bytes_per_token=sum(group.bytes_per_token for group in groups if group.window_tokens is None),
        windows=[(group.window_tokens or 0, group.bytes_per_token) for group in windowed],
        tokens_per_block=size,
        max_batch_size=config.max_batch_size,
    )
    fixed = sum(fixed_window_blocks(group.window_tokens or 0, config) * size * group.bytes_per_token
                for group in windowed)  # fmt: skip
    return CacheCost(plain.slope, max(plain.intercept, fixed))


def divide_blocks(kv_bytes: int, groups: Sequence[LayerGroup], config: BudgetConfig) -> tuple[int, ...]:
    """Blocks of each group's pool out of ``kv_bytes``. ``BudgetError`` when a pool gets none."""
    size = config.tokens_per_block
    if is_plain(groups):
        return (kv_bytes // groups[0].bytes_per_token // size,)
    if any(serves_any_batch(group, config) for group in groups):
        cost = cache_cost(groups, config)
        full = cost.tokens_for_budget(kv_bytes) // size
        return tuple(
            full if group.window_tokens is None else fixed_window_blocks(group.window_tokens, config)
            for group in groups
        )
    layers = {group.window_tokens or config.max_seq_len: group.bytes_per_token for group in groups}
    shares = configured_shares(config, layers)
    plan_windows(kv_bytes, layers, tokens_per_block=size, max_seq_len=config.max_seq_len, shares=shares)
    blocks = window_blocks(kv_bytes, layers, size, shares)
    return tuple(blocks[group.window_tokens or config.max_seq_len] for group in groups)


def ledger_groups(kv_bytes: int, groups: Sequence[LayerGroup], config: BudgetConfig) -> list[LedgerGroup]:
    """The pools as the ledger lists them."""
    return [
        LedgerGroup(
            group.name,
            blocks * config.tokens_per_block * group.bytes_per_token,
            blocks,
            group.bytes_per_token,
            group.window_tokens,
            len(group.layers),
        )
        for group, blocks in zip(groups, divide_blocks(kv_bytes, groups, config), strict=True)
    ]


def least_blocks(group: LayerGroup, config: BudgetConfig) -> int:
    """Blocks with which the group's pool serves one request of full length."""
    if group.window_tokens is None:
        return config.blocks_per_max_request
    reach = window_reach_blocks(group.window_tokens, config.tokens_per_block)
    return min(reach, config.blocks_per_max_request) + _slack(config)


def step_slack(group: LayerGroup, blocks: int, config: BudgetConfig) -> int:
    """Blocks of the group's pool, which has ``blocks``, that admission leaves to prompt pieces. ``BudgetError`` when no
    request of full length fits beside them."""
    if group.window_tokens is None:
        return 0
    slack = _slack(config)
    if blocks < least_blocks(group, config):
        reach = least_blocks(group, config) - slack
        raise BudgetError(
            f"The pool of the layers with a window of {group.window_tokens} tokens has {blocks} blocks of "
            f"{config.tokens_per_block} tokens; one request takes {reach} and the prompt pieces of a step {slack}. "
            "Lower max_num_tokens, raise free_gpu_memory_fraction, or give that window a larger part of pool_ratio."
        )
    return slack
