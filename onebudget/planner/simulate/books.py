"""KV managers over pools that are numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError
from onebudget.resources.kv.choice import kv_manager
from onebudget.resources.kv.counters import KVCounters
from onebudget.resources.kv.division import LayerGroup, step_slack
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.tier import CountedTier

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.resources.kv.helix import HelixRank
    from onebudget.resources.kv.manager import KVCacheManager
    from onebudget.resources.kv.tier import BlockTier


@dataclass(slots=True)
class CopyMeter:
    """Bytes that were copied between the device and tiers below it, since somebody asked last."""

    copied_bytes: int = 0

    def take(self) -> int:
        copied, self.copied_bytes = self.copied_bytes, 0
        return copied


class MeteredStore(CountedStore):
    """Blocks without contents whose copies are counted."""

    def __init__(self, num_blocks: int, tokens_per_block: int, block_bytes: int, meter: CopyMeter) -> None:
        super().__init__(num_blocks, tokens_per_block, block_bytes)
        self._meter = meter

    def offload(self, blocks: Sequence[int], tier: BlockTier, slots: Sequence[int]) -> bool:
        self._meter.copied_bytes += len(blocks) * self.block_bytes
        return True

    def onboard(self, tier: BlockTier, slots: Sequence[int], blocks: Sequence[int]) -> int:
        self._meter.copied_bytes += len(slots) * self.block_bytes
        return len(slots)


@dataclass(frozen=True, slots=True)
class CountedPool:
    """One pool of the KV cache: its blocks, the window of its layers (None: they attend to everything), and what those
    layers cache of one token, which only tiers below the device ask for."""

    blocks: int
    window_tokens: int | None = None
    bytes_per_token: int = 0


def counted_kv_manager(
    pools: Sequence[CountedPool],
    config: BudgetConfig,
    *,
    attended_tokens_cap: int | None = None,
    helix: HelixRank | None = None,
    meter: CopyMeter | None = None,
) -> KVCacheManager:
    """The manager that ``config`` asks for, of one rank under ``helix``; ``meter`` hears of its copies.

    Whole blocks are reused, because traces know of no smaller pieces.
    """
    if not pools or any(pool.blocks < 1 for pool in pools):
        raise ConfigError.for_field("kv_blocks", [pool.blocks for pool in pools], "at least 1 block per pool")
    if config.kv_pool_rebalance and len(pools) > 1:
        _require_sizes("kv_pool_rebalance", config.kv_pool_rebalance, pools)
    counters = KVCounters()
    meter = meter or CopyMeter()
    groups = [_group(pool, pools, config, counters, meter) for pool in pools]
    return kv_manager(
        groups, config, helix=helix, partial_reuse=False, attended_tokens_cap=attended_tokens_cap, counters=counters
    )


def _group(
    pool: CountedPool, pools: Sequence[CountedPool], config: BudgetConfig, counters: KVCounters, meter: CopyMeter
) -> KVGroup:
    layers = LayerGroup(pool.window_tokens, (), pool.bytes_per_token)
    near, far, *_ = [
        *_tier("host", config.host_cache_bytes, pool, pools, config),
        *_tier("disk", config.disk_cache_bytes, pool, pools, config),
        None,
        None,
    ]
    return KVGroup(
        MeteredStore(pool.blocks, config.tokens_per_block, pool.bytes_per_token * config.tokens_per_block, meter),
        window_tokens=pool.window_tokens,
        step_slack_blocks=step_slack(layers, pool.blocks, config),
        near=near,
        far=far,
        counters=counters,
    )


def _tier(
    name: str, tier_bytes: int, pool: CountedPool, pools: Sequence[CountedPool], config: BudgetConfig
) -> list[CountedTier]:
    """The pool's share of a tier by bytes; nothing where that is no block."""
    if not tier_bytes:
        return []
    _require_sizes(f"{name}_cache_bytes", tier_bytes, pools)
    total = sum(one.blocks * one.bytes_per_token for one in pools)
    slots = tier_bytes * pool.blocks // (total * config.tokens_per_block)
    return [CountedTier(name, slots, in_memory=name == "host")] if slots else []


def _require_sizes(knob: str, value: object, pools: Sequence[CountedPool]) -> None:
    if any(one.bytes_per_token < 1 for one in pools):
        raise ConfigError(
            f"{knob} = {value} can't be counted in blocks: bytes per token of the KV cache are not known. Give "
            "--kv-bytes-per-token, or a ledger with --plan.",
            field=knob,
            value=value,
        )
