"""Pools of the KV cache that can change their size, where the device and the sizes allow it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.resources.kv.division import least_blocks
from onebudget.resources.kv.elastic import ElasticPool, step_blocks, unit_blocks
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.buffers import BufferManager
    from onebudget.config import BudgetConfig
    from onebudget.engine.station import Station
    from onebudget.resources.kv.division import LayerGroup
    from onebudget.resources.kv.pool import KVLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElasticSize:
    """A pool in whole device pages: its blocks now, the most it may ever have, and by how many it changes."""

    layout: KVLayout
    blocks: int
    most_blocks: int
    step_blocks: int

    def make(self, manager: BufferManager) -> ElasticPool:
        return ElasticPool(
            manager, self.layout, self.blocks, most_blocks=self.most_blocks, step_blocks=self.step_blocks
        )


def elastic_sizes(
    station: Station,
    config: BudgetConfig,
    groups: Sequence[LayerGroup],
    layouts: Sequence[KVLayout],
    blocks: Sequence[int],
) -> list[ElasticSize] | None:
    """The pools of ``blocks`` rounded down to whole pages in every part of every layer, so that they never take more.

    None where ``kv_pool_rebalance`` is off, and, with a warning, where pools keep their size. All ranks call this, and
    none of them goes without the others.
    """
    if not config.kv_pool_rebalance:
        return None
    why = _why_not(station, config, groups, layouts, blocks)
    if any(station.ranks.gather(why is not None)):
        logger.warning("kv_pool_rebalance stays off: %s", why or "pools of another rank keep their size")
        return None
    alignment = station.device.vmm.alignment_bytes
    quota = sum(layout.block_bytes * count for layout, count in zip(layouts, blocks, strict=True))
    return [_size(layout, count, alignment, quota) for layout, count in zip(layouts, blocks, strict=True)]


def _size(layout: KVLayout, blocks: int, alignment: int, quota_bytes: int) -> ElasticSize:
    unit = unit_blocks(layout, alignment)
    most = align_up(quota_bytes // layout.block_bytes, unit)
    return ElasticSize(layout, blocks // unit * unit, most, step_blocks(layout, alignment, quota_bytes))


def _why_not(
    station: Station,
    config: BudgetConfig,
    groups: Sequence[LayerGroup],
    layouts: Sequence[KVLayout],
    blocks: Sequence[int],
) -> str | None:
    if len(layouts) < 2:
        return "all layers look back equally far, so there is one pool."
    if not station.device.facts.vmm_supported:
        return f"{station.device.name} has no virtual memory, so pools keep their size."
    alignment = station.device.vmm.alignment_bytes
    for group, layout, count in zip(groups, layouts, blocks, strict=True):
        unit, least = unit_blocks(layout, alignment), least_blocks(group, config)
        if count // unit * unit < least:
            return (
                f"{count} blocks in pieces of {unit}, which fill whole device pages of {alignment} B, have no room for "
                f"the {least} that one request and a step's prompt pieces take ({group.name})."
            )
    return None
