"""What graphs will hold, told from recordings of shapes alone: no weights, no device memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from onebudget.attention.pages import page_groups
from onebudget.budget.reserves import ReserveLine
from onebudget.engine.graphs import DecodeGraphs, graph_batch_sizes, padding_blocks
from onebudget.engine.kv_cache import build_kv_cache
from onebudget.engine.station import fake_station
from onebudget.graphs.cost import MIN_SAMPLES, BucketBytes, CaptureCost, sample_sizes
from onebudget.units import align_up, format_bytes

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.models.facts import ModelFacts

_DRY_BLOCKS = 8
"""KV blocks of a recording: enough for a dummy in every group."""


@dataclass(frozen=True, slots=True)
class GraphDeclaration:
    """Bytes of everything graphs keep on the device. The pool is as large as its largest graph.

    ``padding_bytes``: KV blocks of the dummy that fills batches up, held in the pools of the cache beside the blocks
    that the ledger counts there. ``arena_bytes``: batch size -> memory of its graph inside the pool. ``buffer_bytes``:
    every buffer by itself, because each is rounded up to pages.
    """

    pool_bytes: int
    scratch_bytes: int
    static_bytes: int
    padding_bytes: int
    arena_bytes: Mapping[int, int]
    buffer_bytes: tuple[int, ...]
    capture_cost: CaptureCost | None = None
    """How the pool grows, where enough captures were recorded to tell."""

    def physical_bytes(self, granule_bytes: int) -> int:
        return self.padding_bytes + sum(align_up(nbytes, granule_bytes) for nbytes in self.buffer_bytes)


def declare_graphs(folder: Path, facts: ModelFacts, dtype: str, config: BudgetConfig) -> GraphDeclaration | None:
    """Record the decode graphs of this engine on meta tensors; None where it captures none."""
    sizes = engine_graph_sizes(facts, config)
    if not sizes:
        return None
    stamp = (folder / "config.json").stat().st_mtime_ns
    return _recorded(folder, stamp, dtype, config.replace(cuda_graph_batch_sizes=sizes))


def engine_graph_sizes(facts: ModelFacts, config: BudgetConfig) -> tuple[int, ...]:
    """Captured batch sizes of an engine for this model: none where several ranks share it, because their exchanges
    stand between the operations of a forward."""
    return tuple(graph_batch_sizes(config)) if facts.ranks == 1 else ()


@lru_cache(maxsize=8)
def _recorded(folder: Path, stamp: int, dtype: str, config: BudgetConfig) -> GraphDeclaration:
    sizes = config.cuda_graph_batch_sizes
    assert sizes is not None
    station = fake_station(folder, dtype)
    try:
        kv = build_kv_cache(station, config.replace(host_cache_bytes=0), _DRY_BLOCKS, probe_lengths=[[1]])
        graphs = DecodeGraphs(station, config, kv, page_groups(kv), sample_sizes(sizes))
        growth = list(graphs.capture(warm=False).growth_bytes.values())
        declared = GraphDeclaration(
            pool_bytes=graphs.runner.pool_bytes,
            scratch_bytes=graphs.scratch_bytes,
            static_bytes=graphs.static.device_bytes,
            padding_bytes=padding_blocks(sizes, config) * sum(group.store.block_bytes for group in kv.groups),
            arena_bytes=_by_size(graphs, sizes),
            buffer_bytes=tuple(buffer.capacity_bytes for buffer in graphs.buffers),
            capture_cost=CaptureCost.from_growth(growth) if len(growth) >= MIN_SAMPLES else None,
        )
        graphs.release()
        kv.shutdown()
        return declared
    finally:
        station.close()


def _by_size(graphs: DecodeGraphs, sizes: tuple[int, ...]) -> dict[int, int]:
    lines = BucketBytes(graphs.bytes_by_size)
    return {size: lines.bytes_for(size) for size in sizes}


def graph_reserves(declared: GraphDeclaration | None, granule_bytes: int) -> list[ReserveLine]:
    """The ledger's line for graphs: nothing of it is seen by a profile, and all of it stays for good."""
    if declared is None:
        return []
    sizes = ", ".join(f"{size} ({format_bytes(nbytes)})" for size, nbytes in sorted(declared.arena_bytes.items()))
    growth = "" if declared.capture_cost is None else f" ({declared.capture_cost})"
    return [
        ReserveLine(
            "graphs",
            declared.physical_bytes(granule_bytes),
            reason=f"decode graphs of batch sizes {sizes}: pool {format_bytes(declared.pool_bytes)}{growth}, scratch "
            f"{format_bytes(declared.scratch_bytes)}, inputs {format_bytes(declared.static_bytes)}, in whole pages; "
            f"KV blocks for padding {format_bytes(declared.padding_bytes)}",
            owner="graphs",
        )
    ]
