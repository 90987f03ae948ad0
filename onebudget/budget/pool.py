"""From the bytes of the pool to tokens and blocks, and back from a need to the bytes that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil
from typing import TYPE_CHECKING

from onebudget.budget.ledger import KVCacheLine, KVGroup

if TYPE_CHECKING:
    from onebudget.budget.shares import Inputs, Shares


Groups = Callable[[int], Iterable[KVGroup]]
"""Divides the bytes of a pool into the pools of its layer groups."""


def pool_tokens(inputs: Inputs, kv_bytes: int) -> int:
    """Tokens that ``kv_bytes`` hold. Where a token costs nothing (only recurrent layers) memory does not bound them:
    then the user's token cap does, or whole blocks for a full request in every seat; 0 while even the fixed part is
    short.
    """
    cost, config = inputs.cost, inputs.config
    if cost.slope > 0:
        return cost.tokens_for_budget(kv_bytes)
    if kv_bytes < cost.intercept:
        return 0
    return config.kv_max_tokens or inputs.min_tokens * config.max_batch_size * inputs.pp_size


def pool_line(inputs: Inputs, pool_bytes: int, groups: Groups | None = None) -> KVCacheLine:
    """The ledger's line of a pool of ``pool_bytes``; all zero when not one block fits."""
    config, cost = inputs.config, inputs.cost
    tokens = pool_tokens(inputs, pool_bytes)
    blocks = tokens // config.tokens_per_block
    fits = blocks > 0
    kv_bytes = _usable_bytes(inputs, pool_bytes) if fits else 0
    return KVCacheLine(
        bytes=kv_bytes,
        tokens=tokens if fits else 0,
        blocks=blocks,
        tokens_per_block=config.tokens_per_block,
        bytes_per_token=max(cost.slope, 0),
        fixed_bytes=max(cost.intercept, 0),
        max_concurrency_at_max_seq_len=blocks / config.blocks_per_max_request,
        groups=tuple(groups(kv_bytes)) if groups and fits else (),
    )


def _usable_bytes(inputs: Inputs, pool_bytes: int) -> int:
    """Where tokens cost nothing, bytes beyond the fixed part would have no use and stay unassigned."""
    return pool_bytes if inputs.cost.slope > 0 else max(inputs.cost.intercept, 0)


def missing_bytes(inputs: Inputs, shares: Shares) -> int:
    """How much must be found so that one request of ``max_seq_len`` fits: 0 when it does already.

    With this many more bytes on the card, and every hard cap raised by as many, the derivation gives a pool of at least
    ``min_kv_bytes``.
    """
    budget = budget_needed(inputs)
    soft = ceil(budget / inputs.config.free_fraction_exact) - shares.left_bytes
    hard = [budget - cap.limit_bytes for cap in shares.caps if cap.name != "free_gpu_memory_fraction"]
    return max(0, soft, *hard)


def budget_needed(inputs: Inputs) -> int:
    """The smallest budget, before cuts, that leaves ``min_kv_bytes`` of pool."""
    need = inputs.min_kv_bytes
    k, workspace = inputs.cost.slope, inputs.context_workspace
    if workspace and workspace.kv_len_cap and workspace.bytes_per_token > 0 and k > 0:
        w = workspace.bytes_per_token
        shared = (need - 1) * (k + w) // k + 1
        need = min(need + w * workspace.kv_len_cap, shared)
    return need + sum(line.bytes for line in inputs.reserves if line.kind == "cuts_kv")
