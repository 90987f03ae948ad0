"""The order an engine comes to life: check, load, profile, derive, tear the probe down, build for service, warm up."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebudget.attention import check_kv_dtype
from onebudget.attention.pages import page_groups
from onebudget.budget.estimation import why_estimation_is_off
from onebudget.budget.profile import ProfileResult
from onebudget.buffers import BufferManager
from onebudget.config import BudgetConfig, resolve_max_seq_len
from onebudget.engine.agreement import agree_on_ledger, agree_on_settings
from onebudget.engine.assembly import build_executor
from onebudget.engine.derivation import engine_ledger, left_out
from onebudget.engine.dry_runs import WholeModel
from onebudget.engine.executor import Counters, Executor
from onebudget.engine.graph_budget import declare_graphs, engine_graph_sizes
from onebudget.engine.graphs import DecodeGraphs, GraphCounts, padding_blocks
from onebudget.engine.kv_cache import pool_blocks
from onebudget.engine.probe import full_cache_tells, measure, probe_batches, run_dummies, run_full_cache
from onebudget.engine.ranks import RankGroup
from onebudget.engine.reclaiming import leave_smallest_scratch, start_reclaiming
from onebudget.engine.sleep import Sleeper
from onebudget.engine.stages import Stages
from onebudget.engine.station import Station
from onebudget.errors import AllocationError, BudgetError
from onebudget.graphs.arena import ALIGNMENT_BYTES
from onebudget.graphs.cost import warn_beyond, warn_of_buckets
from onebudget.models import load, tensor_parallel
from onebudget.units import align_up

if TYPE_CHECKING:
    from pathlib import Path

    from onebudget.budget.ledger import Ledger
    from onebudget.device.base import Device
    from onebudget.models.facts import ModelFacts
    from onebudget.progress import Progress


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """A running engine and the ledger it runs inside."""

    config: BudgetConfig
    ledger: Ledger
    executor: Executor
    station: Station
    sleeper: Sleeper
    tokenizer: Any
    generation_defaults: Any
    end_token_ids: frozenset[int]

    def close(self) -> None:
        self.executor.shutdown()
        self.station.close()


def build_engine(
    folder: Path,
    config: BudgetConfig,
    device: Device,
    progress: Progress,
    *,
    strict_memory: bool,
    ranks: RankGroup | None = None,
    attention_dp: bool = False,
) -> Engine:
    """Everything from a model folder and a device to an engine ready to serve, this rank's part of it with ``ranks``,
    which has requests of its own with ``attention_dp``.

    Takes over ``device``: it is closed with the engine, and also when building fails. Raises ``ModelError`` for
    unusable files and ``BudgetError``, with the whole ledger, when the model can't be served on this device.
    """
    with ExitStack() as undo:
        undo.callback(device.close)
        ranks = ranks or RankGroup()
        ranks.when_parted(tensor_parallel.forget_meshes)
        with ranks.stage("check"):
            facts = tensor_parallel.facts_of_rank(
                folder, load.read_facts(folder), ranks.size, attention_dp=attention_dp
            )
            check_kv_dtype(facts, config.kv_cache_dtype)
            config = resolve_max_seq_len(config, facts.max_position).config
            dtype = load.choose_dtype(config.dtype, facts, device.torch_device)
            agree_on_settings(ranks, config, facts, dtype)
            tokenizer = load.load_tokenizer(folder)
        with ranks.stage("load"), progress.stage("load", None):
            module = load.host_model(folder, dtype)
            ranks.meet()
        generation_defaults, end_token_ids = module.generation_config, load.end_token_ids(module, tokenizer)
        manager = BufferManager(device.create_stream())
        undo.callback(manager.close)
        with ranks.stage("profile"):
            profiled = _profiled(folder, module, facts, dtype, config, device, manager, progress, ranks)
            station = profiled.station
            undo.callback(station.model.release)
        with ranks.stage("derive"):
            ledger = engine_ledger(
                folder, facts, dtype, config, profiled.profile,
                device=device, rounding_bytes=profiled.rounding_bytes, notes=profiled.notes,
            )  # fmt: skip
            ledger = agree_on_ledger(ranks, ledger, config)
        device.reset_peak()
        cap = ledger.admission.attended_tokens_cap
        blocks = pool_blocks(facts, dtype, config, ledger.kv_cache)
        probed = why_estimation_is_off(config) is None
        with ranks.stage("build"):
            padding = 0 if "graphs" in left_out.get() else padding_blocks(engine_graph_sizes(facts, config), config)
            blocks = tuple(count + padding for count in blocks)
            executor = build_executor(station, config, blocks, metered=probed, attended_tokens_cap=cap)
            undo.callback(executor.shutdown)
        with ranks.stage("warm_up"), station.stages.open("warm_up"):
            _warm_up(executor, station, config, progress)
        with ranks.stage("graphs"):
            _capture_graphs(executor, station, folder, config, ledger, progress)
            start_reclaiming(executor, config)
        executor.runner.metered = strict_memory
        undo.pop_all()
        sleeper = Sleeper(station, executor, folder)
        return Engine(config, ledger, executor, station, sleeper, tokenizer, generation_defaults, end_token_ids)


@dataclass(frozen=True, slots=True)
class _Profiled:
    station: Station
    profile: ProfileResult
    rounding_bytes: int
    notes: tuple[str, ...] = ()


def _profiled(
    folder: Path,
    module: Any,
    facts: ModelFacts,
    dtype: str,
    config: BudgetConfig,
    device: Device,
    manager: BufferManager,
    progress: Progress,
    ranks: RankGroup,
) -> _Profiled:
    """The placed model and its profile. Where the device is too small for that, a dry run says by how much.

    A device may hold the engine and yet not the profile with its own pool. Where books are exact the dry run's figures
    equal the measured ones, so they stand in.
    """

    def dry_run() -> ProfileResult:
        with ranks.explaining():
            dry = WholeModel(folder, facts).profile(dtype, config)
            engine_ledger(folder, facts, dtype, config, dry, device=device)
        return dry

    stages = Stages(device, sleepable=config.enable_sleep)
    with ExitStack() as undo:
        try:
            with stages.open("model"):
                model = load.place_weights(module, facts, dtype, manager)
        except AllocationError:
            dry_run()
            raise  # the dry run fits, so something else holds the device: the allocation's own numbers say it best
        undo.callback(model.release)
        ranks.meet()
        station = Station(model, device, manager, stages, ranks)
        try:
            with stages.open("profile"):
                profiled = _Profiled(station, *measure(station, config, progress))
        except (AllocationError, BudgetError):
            dry = dry_run()
            if ranks.shared or not device.accounts_exactly:
                raise
            sample = device.sample()
            profiled = _Profiled(station, dry, sample.total - sample.free - sample.alloc_live, (_DRY_RUN_STOOD_IN,))
        undo.pop_all()
        return profiled


_DRY_RUN_STOOD_IN = "The profile did not fit beside its own KV pool; a dry run of the same steps stands in for it."


def _capture_graphs(
    executor: Executor, station: Station, folder: Path, config: BudgetConfig, ledger: Ledger, progress: Progress
) -> None:
    """Decode graphs within what the ledger holds for them; what finds no room there runs eagerly."""
    sizes = engine_graph_sizes(station.model.facts, config)
    if not sizes:
        return
    held_back = "graphs" not in left_out.get()
    padding_bytes = padding_blocks(sizes, config) * sum(group.store.block_bytes for group in executor.kv.groups)
    allowance = ledger.term("graphs").bytes - padding_bytes if held_back else None
    with progress.stage("graphs", None):
        try:
            graphs = DecodeGraphs(station, config, executor.kv, page_groups(executor.kv), sizes)
        except AllocationError as full:
            logger.warning("no room for graphs, so decode runs eagerly: %s", full)
            return
        graphs.capture(allowance_bytes=allowance)
    executor.runner.graphs = graphs
    if allowance is not None:
        granule = station.device.facts.granularity_bytes
        warn_beyond(allowance, sum(align_up(buffer.capacity_bytes, granule) for buffer in graphs.buffers))
        declared = declare_graphs(folder, station.model.facts, station.model.dtype, config)
        if declared is not None:
            warn_of_buckets(declared.arena_bytes, graphs.bytes_by_size, ALIGNMENT_BYTES)


def _warm_up(executor: Executor, station: Station, config: BudgetConfig, progress: Progress) -> None:
    """Serve the profile's batches once more in the engine that stays: what is measured here stands beside the plan."""
    batches = probe_batches(config, spread=not full_cache_tells(station, config))
    with progress.stage("warm-up", len(batches)) as stage:
        for lengths in batches:
            fitting = [
                length for length in lengths if length < executor.kv.max_resource_count() * config.tokens_per_block
            ]
            run_dummies(executor, fitting)
            stage.advance(1)
        if not left_out.get():  # without one of its reserves an engine is to fail in service, where the proof looks
            run_full_cache(executor, station, keep_marks=True)
    if left_out.get():
        executor.runner.scratch.start_anew()
    else:
        leave_smallest_scratch(executor, config)
    executor.runner.graph_counts = GraphCounts()
    executor.counters = Counters()
    executor.kv.reset_peaks()
