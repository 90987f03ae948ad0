"""The inputs of our derivation from widths alone: a profile, costs and reserves that a dry run would have found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.budget.context_workspace import ContextWorkspace, context_workspace_for
from onebudget.budget.cost import CacheCost
from onebudget.budget.late import LateAllocations, penalty_tables
from onebudget.budget.profile import ProfileResult
from onebudget.budget.reserves import ReserveLine, seat_count
from onebudget.graphs.buckets import default_graph_batch_sizes, filter_graph_batch_sizes
from onebudget.planner.closed_form import (
    Peak,
    expanded_bytes_per_token,
    fixed_workspace_bytes,
    graph_pool_bytes,
)
from onebudget.resources.kv.division import LayerGroup, cache_cost, group_layers, is_plain, ledger_groups
from onebudget.units import align_up, format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import KVGroup
    from onebudget.config import BudgetConfig
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.weights import ParallelLayout


@dataclass(frozen=True, slots=True)
class Modelled:
    """One rank of a model under our engine's settings. ``element_bytes`` is of the computing dtype."""

    dims: Dims
    config: BudgetConfig
    element_bytes: int
    layout: ParallelLayout
    granule_bytes: int
    weights_bytes: int
    peak: Peak

    def profile(self, *, outside_bytes: int) -> ProfileResult:
        """What the probe would have measured; its own KV cache cancels out and is left out."""
        used = self.weights_bytes + self.peak.inputs_bytes
        return ProfileResult(
            model_bytes=self.weights_bytes,
            torch_peak_bytes=self.weights_bytes + self.peak.activation_bytes,
            torch_used_bytes=used,
            device_used_bytes=used + outside_bytes,
            prompt_logits_bytes=self.peak.prompt_logits_bytes,
        )

    @property
    def kv_fp8(self) -> bool:
        return self.config.kv_cache_dtype == "fp8_e4m3"

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers that cache tokens, each layer at the average of all."""
        tp, element = self.layout.tp, 1 if self.kv_fp8 else self.element_bytes
        layers = [layer for layer in self.dims.layers[: -(-len(self.dims.layers) // self.layout.pp)]
                  if layer.kind not in ("state", "shared")]  # fmt: skip
        elements = [layer.latent or max(1, layer.kv_heads // tp) * (layer.k_dim + layer.v_dim) for layer in layers]
        keys = sum(layer.index_bytes for layer in layers if not layer.borrows_index)
        each = (sum(elements) * element + keys) // max(1, len(layers))
        windows = [layer.window if tp == 1 else None for layer in layers]
        return group_layers(windows, each, self.config)

    @property
    def cost(self) -> CacheCost:
        cost = cache_cost(self.layer_groups(), self.config)
        return CacheCost(cost.slope, cost.intercept + self.state_bytes() * self.config.max_batch_size)

    def state_bytes(self) -> int:
        """Recurrent state of one sequence over all layers that keep one."""
        state = self.dims.state
        if state is None:
            return 0
        layers = sum(layer.kind == "state" for layer in self.dims.layers) // self.layout.pp
        matrix = state.matrix * (state.matrix_bytes or self.element_bytes)
        return layers * (state.conv_rows * state.conv_width * self.element_bytes + matrix) // self.layout.tp

    def groups(self) -> Callable[[int], Iterable[KVGroup]] | None:
        layers, fixed = self.layer_groups(), self.state_bytes() * self.config.max_batch_size
        if is_plain(layers) or not layers:
            return None
        return lambda kv_bytes: ledger_groups(kv_bytes - fixed, layers, self.config)

    def context_workspace(self) -> ContextWorkspace | None:
        rate = expanded_bytes_per_token(self.dims, self.element_bytes, tp=self.layout.tp)
        return context_workspace_for(self.config, rate, chunk_bounded=not self.dims.is_latent)

    def reserves(self) -> list[ReserveLine]:
        """The lines that the engine's owners declare, in its order."""
        return [self._workspace(), *self._penalties(), *self._prompt_logits(), *self._rounding(), *self._graphs()]

    def _workspace(self) -> ReserveLine:
        scratch = self._scratch_bytes()
        reason = f"scratch of attention for {self.config.max_batch_size} sequences of {self.config.max_seq_len} tokens"
        return ReserveLine(
            "fixed_workspace", align_up(scratch, self.granule_bytes), reason=reason, owner="attention", basis="modelled"
        )

    def _scratch_bytes(self) -> int:
        tp = self.layout.tp
        return fixed_workspace_bytes(self.dims, self.config, self.element_bytes, tp=tp, fp8=self.kv_fp8)

    def _penalties(self) -> Iterable[ReserveLine]:
        if not self.config.enable_penalties:
            return []
        late = LateAllocations()
        late.register(
            penalty_tables(
                num_sequences=seat_count(max_batch_size=self.config.max_batch_size),
                max_beam_width=self.config.max_beam_width, vocab_size=self.dims.vocab,
                granule_bytes=self.granule_bytes,
            )
        )  # fmt: skip
        return late.reserve_lines()

    def _prompt_logits(self) -> Iterable[ReserveLine]:
        nbytes = self.peak.prompt_logits_bytes
        if nbytes:
            reason = f"log-probabilities of prompts, rows of {self.dims.vocab} tokens, above the peak"
            yield ReserveLine("logits", nbytes, reason=reason, owner="sampler", basis="modelled")

    def _rounding(self) -> Iterable[ReserveLine]:
        for group in self.layer_groups():
            if group.bytes_per_token * self.config.tokens_per_block % self.granule_bytes:
                reason = f"the pool of {group.name} rounds up to pages of {self.granule_bytes} B"
                yield ReserveLine("fragmentation", self.granule_bytes - 1, reason=reason, owner="device")

    def _graphs(self) -> Iterable[ReserveLine]:
        sizes = self._graph_sizes()
        if not sizes:
            return
        rows, tp = max(sizes), self.layout.tp
        pool = graph_pool_bytes(self.dims, self.config, self.element_bytes, rows, tp=tp)
        scratch = self._scratch_bytes() * rows // self.config.max_batch_size
        gaps = self.config.cuda_graph_padding and list(sizes) != list(range(1, rows + 1))
        padding = self.config.tokens_per_block * cache_cost(self.layer_groups(), self.config).slope if gaps else 0
        reason = (
            f"decode graphs of up to {rows} sequences: pool {format_bytes(pool)}, scratch {format_bytes(scratch)}, "
            f"KV blocks for padding {format_bytes(padding)}"
        )
        nbytes = sum(align_up(part, self.granule_bytes) for part in (pool, scratch)) + padding
        yield ReserveLine("graphs", nbytes, reason=reason, owner="graphs", basis="modelled")

    def _graph_sizes(self) -> list[int]:
        config = self.config
        if not config.enable_cuda_graphs or self.layout.tp > 1:
            return []
        wanted = config.cuda_graph_batch_sizes or default_graph_batch_sizes(
            config.max_batch_size, padding=config.cuda_graph_padding
        )
        return filter_graph_batch_sizes(
            wanted, max_batch_size=config.max_batch_size, max_num_tokens=config.max_num_tokens, tokens_per_request=1,
            padding=config.cuda_graph_padding,
        )  # fmt: skip
