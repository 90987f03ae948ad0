"""Limits on the KV pool, each turned into bytes; the lowest one binds."""

from __future__ import annotations

import dataclasses
from math import ceil
from typing import TYPE_CHECKING

from onebudget.budget.ledger import Cap
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from fractions import Fraction

    from onebudget.budget.cost import CacheCost
    from onebudget.config import BudgetConfig


def list_caps(config: BudgetConfig, cost: CacheCost, available_bytes: int) -> tuple[Cap, ...]:
    """Every limit with its bytes. The fraction is the soft ceiling; the others are hard and may only lower it.

    Both hard ceilings are in bytes before anything is converted to tokens, so a byte cap shrinks the token capacity
    too.
    """
    caps = [Cap("free_gpu_memory_fraction", config.free_gpu_memory_fraction, available_bytes)]
    if config.max_gpu_total_bytes is not None:
        caps.append(Cap("max_gpu_total_bytes", config.max_gpu_total_bytes, config.max_gpu_total_bytes))
    if config.kv_max_tokens is not None:
        caps.append(Cap("kv_max_tokens", config.kv_max_tokens, token_cap_bytes(config, cost)))
    lowest = min(cap.limit_bytes for cap in caps)
    return tuple(dataclasses.replace(cap, binding=cap.limit_bytes == lowest) for cap in caps)


def token_cap_bytes(config: BudgetConfig, cost: CacheCost) -> int:
    """``kv_max_tokens`` in bytes: as it is for the v1 manager, with resume head-room for v2 (see
    ``quota_from_tokens``)."""
    assert config.kv_max_tokens is not None
    if config.kv_cache_manager == "v2":
        return quota_from_tokens(cost, config.kv_max_tokens, config.max_util_for_resume_exact)
    return max(cost.bytes_for_tokens(config.kv_max_tokens), 0)


def quota_from_tokens(cost: CacheCost, tokens: int, max_util_for_resume: Fraction) -> int:
    """Byte quota of the v2 manager for a token limit: a paused request only resumes while use stays below
    ``max_util_for_resume``, so the tokens must fit into that share of the quota (rounded up)."""
    return ceil(max(cost.bytes_for_tokens(tokens), 0) / max_util_for_resume)


def v2_quota(config: BudgetConfig, cost: CacheCost) -> int:
    """What the v2 manager takes as its capacity: the lower of the byte cap and the token cap's quota.

    Raises ``ConfigError`` when neither is set, because v2 has no other capacity.
    """
    limits = []
    if config.max_gpu_total_bytes is not None:
        limits.append(config.max_gpu_total_bytes)
    if config.kv_max_tokens is not None:
        limits.append(quota_from_tokens(cost, config.kv_max_tokens, config.max_util_for_resume_exact))
    if not limits:
        raise ConfigError(
            "quota not set: the v2 KV cache manager needs max_gpu_total_bytes or kv_max_tokens",
            field="max_gpu_total_bytes",
            value=None,
            allowed="a size, unless kv_max_tokens is set",
        )
    return min(limits)
