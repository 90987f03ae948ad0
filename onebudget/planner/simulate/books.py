"""KV managers over pools that are numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError
from onebudget.resources.kv.counters import KVCounters
from onebudget.resources.kv.group import KVGroup, window_slack_blocks
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.tier import CountedTier
from onebudget.resources.kv.v2 import KVCacheManagerV2

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class CountedPool:
    """One pool of the KV cache: its blocks, the window of its layers (None: they attend to everything), and how many
    evicted blocks host memory takes."""

    blocks: int
    window_tokens: int | None = None
    host_blocks: int = 0


def counted_kv_manager(
    pools: Sequence[CountedPool], config: BudgetConfig, *, attended_tokens_cap: int | None = None
) -> KVCacheManager:
    """The manager that ``config`` asks for. Whole blocks are reused, because traces know of no smaller pieces."""
    if not pools or any(pool.blocks < 1 for pool in pools):
        raise ConfigError.for_field("kv_blocks", [pool.blocks for pool in pools], "at least 1 block per pool")
    counters = KVCounters()
    groups = [_group(pool, config, counters) for pool in pools]
    settings = {
        "reuse": config.enable_block_reuse,
        "partial_reuse": False,
        "attended_tokens_cap": attended_tokens_cap,
        "counters": counters,
    }
    if config.kv_cache_manager == "v2":
        return KVCacheManagerV2(groups, max_util_for_resume=config.max_util_for_resume_exact, **settings)
    return KVCacheManager(groups, **settings)  # type: ignore[arg-type]


def _group(pool: CountedPool, config: BudgetConfig, counters: KVCounters) -> KVGroup:
    slack = 0
    if pool.window_tokens is not None:
        slack = window_slack_blocks(
            pool.blocks,
            window_tokens=pool.window_tokens,
            tokens_per_block=config.tokens_per_block,
            max_num_tokens=config.max_num_tokens,
            max_batch_size=config.max_batch_size,
        )
    return KVGroup(
        CountedStore(pool.blocks, config.tokens_per_block),
        window_tokens=pool.window_tokens,
        step_slack_blocks=slack,
        near=CountedTier("host", pool.host_blocks) if pool.host_blocks else None,
        counters=counters,
    )
