"""Decode through graphs: static inputs, an attention backend on scratch of its own, and the graphs over both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onebudget.attention import backend_for
from onebudget.attention.base import current_backend
from onebudget.attention.plan import DecodePlan, GroupPlan, StepPlan
from onebudget.engine.inputs import decode_tables, slots_of
from onebudget.errors import AllocationError
from onebudget.graphs.buckets import default_graph_batch_sizes, filter_graph_batch_sizes
from onebudget.graphs.host_graph import HostGraphBackend
from onebudget.graphs.keys import GraphKey, GraphState, Tier
from onebudget.graphs.padding import PaddingDummies
from onebudget.graphs.runner import CUDAGraphRunner
from onebudget.graphs.static import INPUT_IDS, OWNER, POSITION_IDS, SEQ_LENS, ExtraInput, StaticTensors, static_tokens
from onebudget.units import ceil_div, format_bytes
from onebudget.workspace import ScratchBuffer

if TYPE_CHECKING:
    from onebudget.attention.pages import PageGroup
    from onebudget.buffers import Buffer
    from onebudget.config import BudgetConfig
    from onebudget.core import Request, ScheduledBatch
    from onebudget.engine.station import Station
    from onebudget.graphs.base import Forward, GraphBackend, Outputs
    from onebudget.models.facts import ModelFacts
    from onebudget.resources.kv.manager import KVCacheManager

logger = logging.getLogger(__name__)

PlaceSampled = Callable[[torch.Tensor, int, Sequence["Request"]], None]


def graph_batch_sizes(config: BudgetConfig) -> list[int]:
    """Batch sizes that this engine captures for decode; empty where graphs are off."""
    if not config.enable_cuda_graphs:
        return []
    padding = config.cuda_graph_padding
    wanted = config.cuda_graph_batch_sizes
    if wanted is None:
        wanted = tuple(default_graph_batch_sizes(config.max_batch_size, padding=padding))
    return filter_graph_batch_sizes(
        wanted,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        tokens_per_request=1,
        padding=padding,
    )


def length_buckets(facts: ModelFacts, config: BudgetConfig, *, on_host: bool) -> tuple[int, ...]:
    """Attended lengths graphs are laid out for: one for all where the kernels read lengths, else doubling ones, because
    work follows the layout."""
    if backend_for(facts).reads_lengths and on_host:
        return (0,)
    shortest = max(128, config.tokens_per_block)
    lengths = [shortest]
    while lengths[-1] < config.max_seq_len:
        lengths.append(2 * lengths[-1])
    return (*(length for length in lengths if length < config.max_seq_len), config.max_seq_len)


def has_gaps(sizes: Iterable[int]) -> bool:
    """Whether some batch below the largest size matches none of them."""
    known = set(sizes)
    return bool(known) and known != set(range(1, max(known) + 1))


def dummy_blocks(tokens_per_block: int) -> int:
    """KV blocks of the dummy: a prompt of one token, and the one that a step computes."""
    return ceil_div(2, tokens_per_block)


def padding_blocks(sizes: Sequence[int], config: BudgetConfig) -> int:
    """Blocks of every KV group that the engine takes for padding, beside those of the ledger's cache."""
    return dummy_blocks(config.tokens_per_block) if config.cuda_graph_padding and has_gaps(sizes) else 0


@dataclass(slots=True)
class GraphCounts:
    """Steps by the way they ran. ``padded`` are among the ``hits``."""

    hits: int = 0
    padded: int = 0
    eager: int = 0


@dataclass(frozen=True, slots=True)
class CapturedBytes:
    """What capture made resident: ``pool_bytes`` by key, in capture order, is how much the pool grew."""

    growth_bytes: Mapping[GraphKey, int]
    dropped: tuple[GraphKey, ...] = ()


class DecodeGraphs:
    """The graphs of one model runner. Everything on the device is owned by ``graphs`` and stays until ``release``."""

    def __init__(
        self,
        station: Station,
        config: BudgetConfig,
        kv: KVCacheManager,
        groups: Sequence[PageGroup],
        sizes: Sequence[int],
    ) -> None:
        facts = station.model.facts
        on_host = not station.device.torch_device.startswith("cuda")
        self._module = station.model.module
        self._groups = groups
        self._kv = kv
        self._device = station.device
        self._tokens_per_block = config.tokens_per_block
        self._max_seq_len = config.max_seq_len
        self._width = max(ceil_div(config.max_seq_len, self._tokens_per_block), dummy_blocks(self._tokens_per_block))
        self._plans: dict[GraphKey, StepPlan] = {}
        scope = lambda: station.stages.open("workspace")  # noqa: E731
        with ExitStack() as undo:
            self.static = StaticTensors(
                station.manager,
                tokens=static_tokens(max_bucket=max(sizes), max_num_tokens=config.max_num_tokens),
                max_bucket=max(sizes),
                extras=[extra for number in range(len(groups)) for extra in self._extras(number)],
                scope=scope,
            )
            undo.callback(self.static.release)
            self._scratch = _GraphScratch(station.manager, scope=scope)
            undo.callback(self._scratch.release)
            self._attention = backend_for(facts)(groups, self._scratch, facts, station.model.dtype)
            self.dummies = PaddingDummies([kv])
            self._platform = _platform(station, on_host, scope)
            self.runner = CUDAGraphRunner(
                self._platform,
                sizes,
                max_batch_size=config.max_batch_size,
                dummies=self.dummies if config.cuda_graph_padding else None,
                length_buckets=length_buckets(facts, config, on_host=on_host),
            )
            undo.pop_all()

    def _extras(self, group: int) -> list[ExtraInput]:
        names = _Names.of(group)
        extras = [
            ExtraInput(names.slots, "int64", ("tokens",)),
            ExtraInput(names.tables, "int32", ("batch", self._width)),
        ]
        return (
            extras if names.lengths == SEQ_LENS else [*extras, ExtraInput(names.lengths, "int32", ("batch",), fill=1)]
        )

    # -- capture ----------------------------------------------------------------------------------------------

    def capture(self, *, allowance_bytes: int | None = None, warm: bool = True) -> CapturedBytes:
        """Capture every key, largest first, then keep a padding dummy where batches will be padded.

        ``allowance_bytes``: what may become resident in total; keys that would go beyond it are left out, with one
        warning. Without ``warm`` no forward runs before the captures.
        """
        dummy = self.dummies.get()
        if dummy is None:
            return CapturedBytes({}, tuple(self.runner.capture_keys()))
        growth: dict[GraphKey, int] = {}
        dropped: list[GraphKey] = []
        try:
            if warm:
                with self.runner.allow_capture(warmup_only=True):
                    for key in self.runner.capture_keys():
                        self._try(key, dummy, allowance_bytes, growth, dropped)
                self._scratch.seal()
            if allowance_bytes is not None:
                self._platform.pool_limit_bytes = allowance_bytes - self.static.device_bytes - self.scratch_bytes
            with self.runner.allow_capture():
                for key in self.runner.capture_keys():
                    self._try(key, dummy, allowance_bytes, growth, dropped)
        finally:
            if not self._pads():
                self.dummies.release()
                self.runner.dummies = None
            self._set_aside(dummy_blocks(self._tokens_per_block) if self.runner.padding else 0)
        if dropped:
            left = sorted({key.batch_size for key in dropped})
            logger.warning("no room for graphs of batch sizes %s: they run eagerly", ", ".join(map(str, left)))
        return CapturedBytes(growth, tuple(dropped))

    def _try(
        self,
        key: GraphKey,
        dummy: Request,
        allowance_bytes: int | None,
        growth: dict[GraphKey, int],
        dropped: list[GraphKey],
    ) -> None:
        if key in dropped:
            return
        before = self.runner.pool_bytes
        try:
            self._write([dummy] * key.batch_size, key)
            self.runner.run(key, self._forward(key), self._plan(key))
        except AllocationError as full:
            logger.info("%s", full)
            dropped.append(key)
            return
        growth[key] = self.runner.pool_bytes - before
        if allowance_bytes is not None and self.allocated_bytes > allowance_bytes:
            logger.info(
                "graphs hold %s of the %s they may", format_bytes(self.allocated_bytes), format_bytes(allowance_bytes)
            )
            self.runner.drop(key)
            dropped.append(key)

    def renew_padding(self) -> None:
        """Make dummies anew whose blocks lost their contents: what lies there now may be no numbers."""
        made = len(self.dummies) > 0
        self.dummies.release()
        if made:
            self.dummies.get()

    def _pads(self) -> bool:
        """Whether some batch will really be padded."""
        captured = {key.batch_size for key in self.runner.graphs}
        return self.runner.padding and has_gaps(captured)

    def _set_aside(self, blocks: int) -> None:
        """Let admission leave the blocks of dummies alone."""
        for group in self._kv.groups:
            group.set_aside_blocks = blocks

    def _plan(self, key: GraphKey) -> StepPlan:
        """The same object for a key for ever: views of the static tensors."""
        if key not in self._plans:
            self._plans[key] = StepPlan(tuple(self._group_plan(key, number) for number in range(len(self._groups))))
        return self._plans[key]

    def _group_plan(self, key: GraphKey, number: int) -> GroupPlan:
        names, size = _Names.of(number), key.batch_size
        width = self._table_width(key)
        decode = DecodePlan(
            sequences=size,
            padded_tokens=width * self._tokens_per_block,
            longest=width * self._tokens_per_block,
            lengths=self.static[names.lengths][:size],
            blocks=self.static[names.tables].view(-1)[: size * width],
            uniform=False,
            captured=True,
        )
        return GroupPlan(self.static[names.slots][: key.tokens()], [], decode)

    def _table_width(self, key: GraphKey) -> int:
        return ceil_div(key.length_bucket, self._tokens_per_block) or self._width

    def _forward(self, key: GraphKey) -> Forward:
        plan, tokens = self._plan(key), key.tokens()

        def forward() -> Outputs:
            active = current_backend.set(self._attention)
            try:
                self.static.upload_in_graph(key.batch_size)
                self._attention.begin(plan)
                logits: torch.Tensor = self._module(
                    input_ids=self.static[INPUT_IDS][None, :tokens],
                    position_ids=self.static[POSITION_IDS][:, :tokens],
                    use_cache=False,
                    logits_to_keep=0,
                ).logits[0]
            finally:
                current_backend.reset(active)
            return (logits,) if key.tier is Tier.FULL else (logits, torch.argmax(logits, dim=-1))

        return forward

    # -- the step ---------------------------------------------------------------------------------------------

    def choose(self, batch: ScheduledBatch) -> GraphKey | None:
        """The graph to run this batch through; None: eager."""
        longest = max((r.computed_tokens + r.step_tokens for r in batch.requests), default=0)
        return self.runner.choose(batch, longest) if longest <= self._max_seq_len else None

    def run(self, batch: ScheduledBatch, key: GraphKey, place_sampled: PlaceSampled | None = None) -> torch.Tensor:
        """Logits ``[live rows, vocab]`` of last chunks, then of generating requests; valid until the next replay.

        ``place_sampled(ids, start, rows)`` writes the tokens among the inputs that the host has not read yet.
        """
        rows = [*batch.context_last, *batch.generation]
        live = len(rows)
        with self.runner.padded(rows, key):
            self._write(rows, key, place_sampled)
            logits = self.runner.replay(key, self._plan(key))[0]
        self.static.launched()
        return logits[:live]

    def _write(self, rows: Sequence[Request], key: GraphKey, place_sampled: PlaceSampled | None = None) -> None:
        static, tokens = self.static, len(rows)
        static.stage(INPUT_IDS, [request.tokens_of_step()[0] for request in rows])
        static.stage(POSITION_IDS, [request.computed_tokens for request in rows])
        static.upload(INPUT_IDS, tokens)
        static.upload(POSITION_IDS, tokens)
        if place_sampled is not None:
            place_sampled(static[INPUT_IDS], 0, rows)
        for number, group in enumerate(self._groups):
            self._write_group(rows, key, group, _Names.of(number))

    def _write_group(self, rows: Sequence[Request], key: GraphKey, group: PageGroup, names: _Names) -> None:
        static, size = self.static, self._tokens_per_block
        lengths, tables = decode_tables(rows, group, size)
        static.stage(
            names.slots,
            [slots_of(group.block_table(r), range(r.computed_tokens, r.computed_tokens + 1), size)[0] for r in rows],
        )
        static.upload(names.slots, len(rows))
        static.stage(names.lengths, lengths)
        if names.lengths != SEQ_LENS or not static.capture_h2d:
            static.upload(names.lengths, len(rows))
        if key.length_bucket:
            width = self._table_width(key)
            static.stage(names.tables, [block for t in tables for block in t + t[:1] * (width - len(t))])
            static.upload_elements(names.tables, len(rows) * width)
        else:
            static.stage_rows(names.tables, tables)
            static.upload(names.tables, len(rows))

    # -- memory -----------------------------------------------------------------------------------------------

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.capacity_bytes

    @property
    def buffers(self) -> list[Buffer]:
        pool = getattr(self.runner.graph_pool(), "segments", [])
        return [*self.static.buffers, *self._scratch.buffers, *pool]

    @property
    def allocated_bytes(self) -> int:
        """Device bytes of static inputs, scratch and pool."""
        return self.static.device_bytes + self.scratch_bytes + self.runner.pool_bytes

    @property
    def bytes_by_size(self) -> dict[int, int]:
        """Batch size -> what its largest graph uses of the pool, where the platform tells."""
        used: dict[int, int] = {}
        for key, graph in self.runner.graphs.items():
            used[key.batch_size] = max(graph.nbytes, used.get(key.batch_size, 0))
        return {size: nbytes for size, nbytes in used.items() if nbytes}

    @property
    def captured(self) -> bool:
        return any(self.runner.state(key) is GraphState.CAPTURED for key in self.runner.capture_keys())

    def release(self) -> None:
        self._set_aside(0)
        self.runner.clear()
        self.dummies.release()
        self._plans.clear()
        self._scratch.release()
        self.static.release()


class _GraphScratch(ScratchBuffer):
    """The copy of the scratch that graphs see, whoever asks for it."""

    def _grow(self, nbytes: int, owner: str) -> None:
        super()._grow(nbytes, OWNER)


@dataclass(frozen=True, slots=True)
class _Names:
    """Static inputs of one KV group."""

    slots: str
    tables: str
    lengths: str

    @classmethod
    def of(cls, group: int) -> _Names:
        return cls(f"slots.{group}", f"block_table.{group}", SEQ_LENS if group == 0 else f"{SEQ_LENS}.{group}")


def _platform(station: Station, on_host: bool, scope: object) -> GraphBackend:
    if on_host:
        return HostGraphBackend(station.manager, scope=scope)  # type: ignore[arg-type]
    from onebudget.graphs.cuda_graph import CUDAGraphBackend

    return CUDAGraphBackend(station.device)
