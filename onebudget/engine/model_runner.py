"""One forward over a packed step: inputs in, logits of the rows to sample out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from onebudget.attention import backend_for
from onebudget.attention.base import current_backend
from onebudget.attention.pages import page_groups
from onebudget.device.meter import StorageMeter
from onebudget.engine import logprobs
from onebudget.engine.failures import Relief
from onebudget.engine.graphs import GraphCounts
from onebudget.engine.inputs import StaticInputs
from onebudget.engine.logprobs import layers_once, log_probabilities, prompt_pieces
from onebudget.engine.ranks import RankGroup
from onebudget.engine.sampled import SampledTokens
from onebudget.models.rank_rows import RankRows, current_rows
from onebudget.workspace import AttentionMeta, ScratchBuffer

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager
    from onebudget.config import BudgetConfig
    from onebudget.core import ScheduledBatch
    from onebudget.device.base import Device
    from onebudget.engine.executor import Counters
    from onebudget.engine.graphs import DecodeGraphs
    from onebudget.engine.sampler import Sampler
    from onebudget.engine.stages import Stages
    from onebudget.models.load import LoadedModel
    from onebudget.resources.kv.manager import KVCacheManager
    from onebudget.workspace import EagerWorkspaceReclaimer


logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the static inputs, the scratch and the attention backend of one executor.

    With ``metered`` every forward and its sampling charge the device for their tensors and stay within its capacity.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: BudgetConfig,
        kv: KVCacheManager,
        device: Device,
        manager: BufferManager,
        stages: Stages,
        *,
        metered: bool,
        ranks: RankGroup | None = None,
    ) -> None:
        self._model = model
        self._ranks = ranks or RankGroup()
        self._device = device
        self._manager = manager
        self.metered = metered
        self._prompt_rows = logprobs.prompt_rows_at_once(config)
        groups = page_groups(kv)
        with stages.open("workspace"):
            self.inputs = StaticInputs(manager, config, groups)
        self.scratch = ScratchBuffer(manager, scope=lambda: stages.open("workspace"))
        self._backend = backend_for(model.facts)(groups, self.scratch, model.facts, model.dtype)
        self.meta = AttentionMeta(self.scratch)
        self.reclaimer: EagerWorkspaceReclaimer | None = None
        self.graphs: DecodeGraphs | None = None
        self.graph_counts = GraphCounts()

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Launch the batch; logits ``[rows, vocab]`` of each prompt that ends in this step and each generating request.

        Tokens that the host has not read are taken from ``inputs.sampled``. Logits of a graph are valid until the next
        forward.
        """
        key = None if self.graphs is None else self.graphs.choose(batch)
        if key is None:
            self.graph_counts.eager += 1
            return self._eager(batch)
        assert self.graphs is not None
        self.graph_counts.hits += 1
        self.graph_counts.padded += key.batch_size > batch.size
        with torch.inference_mode():
            return self.graphs.run(batch, key, self.inputs.place_sampled)

    def _eager(self, batch: ScheduledBatch) -> torch.Tensor:
        with self._no_gradients():
            tokens, rows, plan = self.inputs.fill(batch)
            token = current_backend.set(self._backend)
            try:
                with self._rows_of_all(tokens), self._reclaiming(), self._meter():
                    self._backend.kv_written = False
                    self._backend.begin(plan)
                    self.meta.attend(supports_reclamation=self._backend.supports_workspace_reclamation)
                    return self._logits(batch, tokens, rows)
            finally:
                current_backend.reset(token)

    def sample(self, batch: ScheduledBatch, logits: torch.Tensor, sampler: Sampler) -> SampledTokens:
        """One token per row of ``logits``, kept on the device in ``inputs.sampled`` for the next step too."""
        requests = batch.sampled
        if not requests:
            return SampledTokens.known([])
        with self._no_gradients(), self._meter():
            return sampler.launch(logits, requests, into=self.inputs.sampled)

    def set_sampled(self, tokens: list[int]) -> None:
        """Let the next step start from these tokens, where ranks agreed on others than this one sampled."""
        self.inputs.sampled[: len(tokens)].copy_(torch.tensor(tokens, dtype=torch.int64))

    @contextmanager
    def _rows_of_all(self, tokens: int) -> Iterator[None]:
        """Tell the layers that all ranks compute together how many tokens each has in this forward."""
        facts = self._model.facts
        if not facts.attention_dp:
            yield
            return
        counts = self._ranks.gather(tokens) if self._ranks.shared else [tokens] * facts.ranks
        token = current_rows.set(RankRows(tuple(counts), self._ranks.rank))
        try:
            yield
        finally:
            current_rows.reset(token)

    def _reclaiming(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reclaimer is None else self.reclaimer.forward(self.meta)

    def _no_gradients(self) -> AbstractContextManager[Any]:
        # The meter needs no_grad: inference_mode, a few per cent faster, hides temporaries of composite operations.
        return torch.no_grad() if self.metered else torch.inference_mode()

    def _logits(self, batch: ScheduledBatch, tokens: int, rows: int) -> torch.Tensor:
        """Logits ``[rows, vocab]`` to sample from, once log-probabilities of prompts are noted."""
        pieces = prompt_pieces(batch, self._prompt_rows)
        if not pieces:
            return self._head(tokens, self.inputs.last_rows[:rows])
        with layers_once(self._model.module):
            self._head(tokens, self.inputs.last_rows[:0])
            with self._charged_to(logprobs.OWNER):
                device = self.inputs.last_rows.device
                for piece in pieces:
                    index = torch.arange(piece.first_row, piece.first_row + piece.rows, device=device)
                    piece.take(log_probabilities(self._head(tokens, index)))
            return self._head(tokens, self.inputs.last_rows[:rows])

    def _head(self, tokens: int, rows: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]``. The index tensor keeps transformers from computing logits of every packed token."""
        output = self._model.module(
            input_ids=self.inputs.token_ids[None, :tokens],
            position_ids=self.inputs.positions[None, :tokens],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def count(self, counters: Counters) -> None:
        """Write what this runner knows about the steps so far."""
        counts = self.graph_counts
        counters.graph_hits, counters.graph_padded, counters.graph_eager = counts.hits, counts.padded, counts.eager
        counters.scratch_grow = self.scratch.grow_count
        counters.scratch_shrink = self.reclaimer.shrink_count if self.reclaimer else 0

    @property
    def kv_written(self) -> bool:
        """Whether the last forward may have written to the cache."""
        return self._backend.kv_written

    def relieve(self) -> Relief | None:
        """After memory ran out: note who holds what, then give back scratch and caches that no request needs."""
        self._device.synchronize()
        sample, owners = self._device.sample(), dict(self._device.used_by_owner())
        before = self._device.free_bytes()
        if self.graphs is None:  # recordings read and write the scratch where it is
            self.scratch.release()
        self._device.empty_cache()
        if self._device.existing_pool is not None:
            self._manager.pool_trim_to(0)
        return Relief(sample, owners, self._device.free_bytes() - before)

    @contextmanager
    def _meter(self) -> Iterator[None]:
        if not self.metered:
            yield
            return
        with StorageMeter(self._device) as self._active_meter:
            yield

    def _charged_to(self, owner: str) -> AbstractContextManager[None]:
        return self._active_meter.charging(owner) if self.metered else nullcontext()

    @property
    def workspace_buffers(self) -> list[Buffer]:
        """Everything of the workspace stage that exists by now."""
        return [*self.inputs.buffers, *self.scratch.buffers, *(self.graphs.buffers if self.graphs else ())]

    def rebuild_workspace(self, stages: Stages) -> None:
        """New inputs and scratch after their memory was lost; nothing of them outlives a step."""
        self.release()
        with stages.open("workspace"):
            self.inputs.allocate()

    def drop_graphs(self) -> None:
        """Memory that graphs were captured on is another now: decode runs eagerly from here on."""
        if self.graphs is not None:
            logger.warning("graphs stand on memory that was replaced; decode runs without them")
            self._release_graphs()

    def renew_padding(self) -> None:
        """The cache lost its contents, those of padding dummies too."""
        if self.graphs is not None:
            self.graphs.renew_padding()

    def _release_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None

    def release(self) -> None:
        self._release_graphs()
        self.scratch.release()
        self.inputs.release()
