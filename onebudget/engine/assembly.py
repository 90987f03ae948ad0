"""Put one executor together: its KV pool and manager, its runner, its sampler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from onebudget.budget.reserves import seat_count
from onebudget.engine.data_parallel import attention_data_parallel
from onebudget.engine.executor import Executor
from onebudget.engine.kv_cache import build_kv_cache, layer_groups
from onebudget.engine.model_runner import ModelRunner
from onebudget.engine.penalties import PenaltyStore
from onebudget.engine.sampler import Sampler
from onebudget.resources import SequenceSlotManager
from onebudget.resources.kv.division import cache_cost

if TYPE_CHECKING:
    from onebudget.budget.cost import CacheCost
    from onebudget.config import BudgetConfig
    from onebudget.engine.station import Station
    from onebudget.models.facts import ModelFacts


def kv_cost(facts: ModelFacts, dtype: str, config: BudgetConfig) -> CacheCost:
    """Cost of the cache of a model that computes in ``dtype``, in the dtype the config stores it in."""
    return cache_cost(layer_groups(facts, dtype, config), config)


def engine_seats(facts: ModelFacts, config: BudgetConfig) -> int:
    """Sequence slots of an engine: under attention data parallelism one more, for the dummy of a rank whose own
    requests hold all others while their last tokens are on the way."""
    return seat_count(max_batch_size=config.max_batch_size) + facts.attention_dp


def build_executor(
    station: Station,
    config: BudgetConfig,
    blocks: int | Sequence[int],
    *,
    metered: bool,
    probe_lengths: Sequence[Sequence[int]] = (),
    attended_tokens_cap: int | None = None,
) -> Executor:
    """Pools, manager, runner and loop over so many KV blocks of each group, one number for all of them; nothing is left
    when a part does not fit.

    ``attended_tokens_cap`` is the admission cap of an engine that serves; a probe has none.
    """
    kv = build_kv_cache(station, config, blocks, probe_lengths=probe_lengths, attended_tokens_cap=attended_tokens_cap)
    with ExitStack() as undo:
        undo.callback(kv.shutdown)
        runner = ModelRunner(
            station.model, config, kv, station.device, station.manager, station.stages,
            ranks=station.ranks, metered=metered,
        )  # fmt: skip
        undo.callback(runner.release)
        slots = SequenceSlotManager(engine_seats(station.model.facts, config))
        sampler = Sampler(config.seed, _penalties(station, config, slots))
        undo.pop_all()
    own_requests = station.model.facts.attention_dp and station.ranks.shared
    agreement = attention_data_parallel(station.ranks, kv) if own_requests else None
    return Executor(config, runner, kv, slots=slots, sampler=sampler, ranks=station.ranks, agreement=agreement)


def _penalties(station: Station, config: BudgetConfig, slots: SequenceSlotManager) -> PenaltyStore | None:
    if not config.enable_penalties:
        return None
    return PenaltyStore(
        station.manager,
        slots,
        max_beam_width=config.max_beam_width,
        scope=lambda: station.stages.open("workspace"),
    )
