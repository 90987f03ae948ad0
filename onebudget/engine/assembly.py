"""Put one executor together: its KV pool and manager, its runner, its sampler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from onebudget.attention import backend_for
from onebudget.budget.reserves import seat_count
from onebudget.engine.executor import Executor
from onebudget.engine.model_runner import ModelRunner
from onebudget.engine.penalties import PenaltyStore
from onebudget.engine.sampler import Sampler
from onebudget.models.facts import kv_dtype_name
from onebudget.resources import KVCacheManager, SequenceSlotManager
from onebudget.resources.kv.pool import KVLayout, KVPool

if TYPE_CHECKING:
    from onebudget.budget.cost import CacheCost
    from onebudget.config import BudgetConfig
    from onebudget.engine.station import Station
    from onebudget.models.facts import ModelFacts


def kv_layout(station: Station, config: BudgetConfig) -> KVLayout:
    facts = station.model.facts
    parts = backend_for(facts).page_parts(facts)
    dtype = kv_dtype_name(config.kv_cache_dtype, station.model.dtype)
    return KVLayout(len(facts.layers), config.tokens_per_block, parts, dtype)


def kv_cost(facts: ModelFacts, dtype: str, config: BudgetConfig) -> CacheCost:
    """Cost of the cache of a model that computes in ``dtype``, in the dtype the config stores it in."""
    return facts.cache_cost(kv_dtype_name(config.kv_cache_dtype, dtype))


def build_executor(
    station: Station,
    config: BudgetConfig,
    num_blocks: int,
    *,
    metered: bool,
    probe_lengths: Sequence[Sequence[int]] = (),
    attended_tokens_cap: int | None = None,
) -> Executor:
    """Pool, manager, runner and loop over ``num_blocks`` KV blocks; nothing is left when a part does not fit.

    ``attended_tokens_cap`` is the admission cap of an engine that serves; a probe has none.
    """
    with station.stages.open("kv_cache"):
        pool = KVPool(station.manager, kv_layout(station, config), num_blocks)
    kv = KVCacheManager(
        pool,
        reuse=config.enable_block_reuse,
        probe_lengths=probe_lengths,
        attended_tokens_cap=attended_tokens_cap,
    )
    with ExitStack() as undo:
        undo.callback(kv.shutdown)
        runner = ModelRunner(
            station.model, config, kv, station.device, station.manager, station.stages, metered=metered
        )
        undo.callback(runner.release)
        slots = SequenceSlotManager(seat_count(max_batch_size=config.max_batch_size))
        sampler = Sampler(config.seed, _penalties(station, config, slots))
        undo.pop_all()
    return Executor(config, runner, kv, slots=slots, sampler=sampler, ranks=station.ranks)


def _penalties(station: Station, config: BudgetConfig, slots: SequenceSlotManager) -> PenaltyStore | None:
    if not config.enable_penalties:
        return None
    return PenaltyStore(
        station.manager,
        slots,
        max_beam_width=config.max_beam_width,
        scope=lambda: station.stages.open("workspace"),
    )
