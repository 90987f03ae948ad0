"""The KV cache of one executor: pools of its layer groups, tiers below them, and the manager over all of it."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from onebudget.attention import backend_for
from onebudget.budget.ranks import host_tier_bytes
from onebudget.engine.elastic_cache import elastic_sizes
from onebudget.errors import AllocationError, ConfigError
from onebudget.models.facts import KV_DTYPE_BYTES, kv_dtype_name
from onebudget.resources.kv import division
from onebudget.resources.kv.choice import kv_manager
from onebudget.resources.kv.counters import KVCounters
from onebudget.resources.kv.disk_tier import DiskTier
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.pool import KVLayout, KVPool
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import HostLine, KVCacheLine
    from onebudget.config import BudgetConfig
    from onebudget.device.facts import DeviceFacts
    from onebudget.engine.ranks import RankGroup
    from onebudget.engine.station import Station
    from onebudget.models.facts import ModelFacts
    from onebudget.resources.kv.host_tier import HostTier
    from onebudget.resources.kv.manager import KVCacheManager
    from onebudget.resources.kv.tier import BlockTier

logger = logging.getLogger(__name__)


def layer_groups(facts: ModelFacts, dtype: str, config: BudgetConfig) -> tuple[division.LayerGroup, ...]:
    """Groups of layers by how far they look back; several ranks keep one pool for all.

    ``ConfigError`` for a narrower window where layers are latent: theirs have none.
    """
    if config.max_attention_window and "latent" in facts.layers:
        raise ConfigError.for_field("max_attention_window", config.max_attention_window, "None for latent attention")
    element_bytes = KV_DTYPE_BYTES[kv_dtype_name(config.kv_cache_dtype, dtype)]
    layer_bytes = facts.kv_elements_per_token() * element_bytes // max(1, len(facts.layers))
    sliding = facts.sliding_window if facts.ranks == 1 else None
    windows = [sliding if kind == "sliding" else None for kind in facts.layers]
    return division.group_layers(windows, layer_bytes, config)


def pool_blocks(facts: ModelFacts, dtype: str, config: BudgetConfig, line: KVCacheLine) -> tuple[int, ...]:
    """Blocks of each group's pool in a cache of this ledger line."""
    groups = layer_groups(facts, dtype, config)
    return (line.blocks,) if division.is_plain(groups) else division.divide_blocks(line.bytes, groups, config)


def build_kv_cache(
    station: Station,
    config: BudgetConfig,
    blocks: int | Sequence[int],
    *,
    probe_lengths: Sequence[Sequence[int]] = (),
    attended_tokens_cap: int | None = None,
) -> KVCacheManager:
    """``blocks``: of each group's pool, or one number for all of them. The manager of a probe has no tiers."""
    facts, dtype = station.model.facts, station.model.dtype
    layouts = layer_groups(facts, dtype, config)
    counts = [blocks] * len(layouts) if isinstance(blocks, int) else blocks
    counters = KVCounters()
    with ExitStack() as undo:
        pools: list[KVPool] = []
        wanted = [_layout(facts, dtype, config, len(group.layers)) for group in layouts]
        sizes = None if probe_lengths else elastic_sizes(station, config, layouts, wanted, counts)
        for number, (layout, count) in enumerate(zip(wanted, counts, strict=True)):
            with station.stages.open("kv_cache"):
                pools.append(sizes[number].make(station.manager) if sizes else KVPool(station.manager, layout, count))
            undo.callback(pools[-1].release)
        tiers = _Tiers(station, config, pools) if not probe_lengths and uses_tiers(layouts, config) else None
        if tiers is not None:
            undo.callback(tiers.release)
        whole = [pool.num_blocks == count for pool, count in zip(pools, counts, strict=True)]
        groups = [
            KVGroup(
                pool,
                layers=group.layers,
                window_tokens=group.window_tokens,
                step_slack_blocks=0 if probe_lengths else division.step_slack(group, pool.num_blocks, config),
                serves_any_batch=division.serves_any_batch(group, config) and kept and not probe_lengths,
                near=tiers.near(pool) if tiers else None,
                far=tiers.far(pool) if tiers else None,
                counters=counters,
            )
            for group, pool, kept in zip(layouts, pools, whole, strict=True)
        ]
        undo.pop_all()
    return kv_manager(
        groups, config, probe_lengths=probe_lengths, attended_tokens_cap=attended_tokens_cap, counters=counters
    )


def uses_tiers(groups: Sequence[division.LayerGroup], config: BudgetConfig) -> bool:
    """Whether anything ever leaves the device for a lower tier: prefixes that are reused, or suspended sequences."""
    return config.kv_cache_manager == "v2" or (config.enable_block_reuse and division.is_plain(groups))


def _layout(facts: ModelFacts, dtype: str, config: BudgetConfig, layers: int) -> KVLayout:
    parts = backend_for(facts).page_parts(facts)
    return KVLayout(layers, config.tokens_per_block, parts, kv_dtype_name(config.kv_cache_dtype, dtype))


class _Tiers:
    """Host and disk tiers for pools, each pool its share by bytes."""

    def __init__(self, station: Station, config: BudgetConfig, pools: Sequence[KVPool]) -> None:
        self._station = station
        self._config = config
        self._total_bytes = sum(pool.allocated_bytes for pool in pools)
        ranks = ranks_on_node(station.ranks)
        self._host_bytes = host_cache_bytes(config, station.device.facts, self._total_bytes, ranks)
        self._lockable = True
        cut = lock_limit_cut(config, station.device.facts, self._total_bytes, ranks)
        if cut:
            logger.warning("%s", cut)
        self._disk_bytes = config.disk_cache_bytes // ranks
        self._made: dict[int, tuple[BlockTier | None, BlockTier | None]] = {}

    def near(self, pool: KVPool) -> BlockTier | None:
        return self._of(pool)[0]

    def far(self, pool: KVPool) -> BlockTier | None:
        return self._of(pool)[1]

    def _of(self, pool: KVPool) -> tuple[BlockTier | None, BlockTier | None]:
        if id(pool) not in self._made:
            tiers = [tier for tier in (self._host(pool), self._disk(pool)) if tier is not None]
            near, far, *_ = [*tiers, None, None]
            self._made[id(pool)] = near, far
        return self._made[id(pool)]

    def release(self) -> None:
        for tiers in self._made.values():
            for tier in tiers:
                if tier is not None:
                    tier.release()

    def _slots(self, tier_bytes: int, pool: KVPool) -> int:
        share = tier_bytes * pool.allocated_bytes // self._total_bytes // pool.block_bytes
        return self._station.ranks.minimum(share) if tier_bytes else 0

    def _host(self, pool: KVPool) -> HostTier | None:
        """Ranks go without it together when one of them can't have it."""
        slots = self._slots(self._host_bytes, pool)
        if not slots:
            return None
        from onebudget.resources.kv.host_tier import HostTier

        tier: HostTier | None = None
        try:
            tier = HostTier(self._station.manager, slots, pool.block_bytes, pinned=self._lockable)
            self._lockable = tier.pinned
        except AllocationError as error:
            logger.warning("no host tier for the KV cache: %s", error)
        if self._station.ranks.minimum(tier is not None) or tier is None:
            return tier
        tier.release()
        return None

    def _disk(self, pool: KVPool) -> DiskTier | None:
        slots = self._slots(self._disk_bytes, pool)
        if not slots:
            return None
        tier: DiskTier | None = None
        try:
            tier = DiskTier(disk_cache_folder(self._config), slots, pool.block_bytes)
        except OSError as error:
            logger.warning("no disk tier for the KV cache: %s", error)
        if self._station.ranks.minimum(tier is not None) or tier is None:
            return tier
        tier.release()
        return None


def disk_cache_folder(config: BudgetConfig) -> Path:
    return Path(config.disk_cache_dir or Path(tempfile.gettempdir()) / "onebudget-kv")


def ranks_on_node(ranks: RankGroup | None) -> int:
    """Ranks that share this host's memory."""
    size = ranks.size if ranks is not None else 1
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or size)) if size > 1 else 1


def host_cache_bytes(config: BudgetConfig, facts: DeviceFacts, kv_bytes: int, ranks: int) -> int:
    """Bytes of one rank's host tier: its part of ``host_cache_bytes``, no more than is available. The v2 manager takes
    one of its own accord where nobody said, because a suspended sequence has to go somewhere."""
    available = facts.host_available_bytes
    if config.kv_cache_manager == "v2" and "host_cache_bytes" not in config.given:
        if available is None:
            return 0
        return host_tier_bytes(
            device_quota_bytes=kv_bytes,
            host_available_bytes=available,
            ranks_on_node=ranks,
            memlock_limit_bytes=facts.memlock_limit_bytes,
        )
    wanted = config.host_cache_bytes // ranks
    if available is not None and wanted > available // ranks:
        logger.warning(
            "the host tier is cut from %s to the %s a rank that this machine has available",
            format_bytes(wanted),
            format_bytes(available // ranks),
        )
        return available // ranks
    return wanted


def lock_limit_cut(config: BudgetConfig, facts: DeviceFacts, kv_bytes: int, ranks: int) -> str | None:
    """What to say where the limit on locked memory makes a tier smaller that nobody gave a size."""
    if "host_cache_bytes" in config.given:
        return None
    has = host_cache_bytes(config, facts, kv_bytes, ranks)
    wanted = host_cache_bytes(config, dataclasses.replace(facts, memlock_limit_bytes=None), kv_bytes, ranks)
    if has == wanted:
        return None
    return (
        f"the host tier of the KV cache has {format_bytes(has)} instead of {format_bytes(wanted)}: this process may "
        f"lock {format_bytes(facts.memlock_limit_bytes or 0)} of memory (ulimit -l). Paused requests that find no room "
        "in the tier are computed again. Raise the limit, or set host_cache_bytes, which is used unlocked if need be."
    )


def host_lines(
    config: BudgetConfig,
    facts: DeviceFacts,
    kv_bytes: int,
    ranks: int,
    groups: Sequence[division.LayerGroup] = (),
) -> list[HostLine]:
    """What the tiers below the card take of the host, for a cache of these groups of layers."""
    from onebudget.budget.ledger import HostLine

    if groups and not uses_tiers(groups, config):
        return []
    sizes = {
        "host_kv_tier": host_cache_bytes(config, facts, kv_bytes, ranks),
        "disk_kv_tier": config.disk_cache_bytes // ranks,
    }
    return [HostLine(name, size, "rank") for name, size in sizes.items() if size]
