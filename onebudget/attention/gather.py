"""Attention on stock torch operations: attended pages are gathered into scratch, then attended densely.

Prompt pieces run one by one through torch's flash kernel. A piece attends to its own packed K/V; what was cached before
it is staged, attended apart and merged by the two log-sum-exps, so no mask is ever built for it. All generating
sequences run as one padded batch over a staging area of ``sequences x padded length`` rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from onebudget.attention.base import AttentionBackend
from onebudget.attention.kernels import additive_mask, decode_mask, flash, grouped_attention
from onebudget.attention.operations import paged_decode
from onebudget.units import align_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onebudget.attention.pages import PageGroup
    from onebudget.attention.plan import ContextSpan, GroupPlan, StepPlan
    from onebudget.config import BudgetConfig
    from onebudget.models.facts import ModelFacts
    from onebudget.workspace import ScratchBuffer


class GatherBackend(AttentionBackend):
    name: ClassVar[str] = "gather"
    reads_lengths: ClassVar[bool] = True
    supports_workspace_reclamation: ClassVar[bool] = True

    def __init__(self, groups: Sequence[PageGroup], scratch: ScratchBuffer, model: ModelFacts, dtype: str) -> None:
        super().__init__(groups, scratch, model, dtype)
        self._plan: StepPlan | None = None
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._stages: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def workspace_fixed_bytes(cls, model: ModelFacts, element_bytes: int, config: BudgetConfig) -> int:
        """The staging area of the largest decode batch: every sequence padded to the longest possible one.

        Prompt pieces that continue stage their prefix in it, one sequence at a time, so they take nothing beyond it
        however much they attend to: the rate per attended token is 0.
        """
        rows = config.max_batch_size * align_up(config.max_seq_len, config.tokens_per_block)
        return rows * 2 * model.num_kv_heads * model.head_dim * element_bytes

    @classmethod
    def page_parts(cls, model: ModelFacts) -> tuple[tuple[int, ...], ...]:
        return ((model.num_kv_heads, model.head_dim),) * 2

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._masks = {}
        counts = {(number, count) for number, group in enumerate(plan.groups) for count in _staged_blocks(group)}
        self._stages = {}
        if counts:
            most = max(self._staged_bytes(number, count) for number, count in counts)
            self._staging = scratch = self._scratch.require(most)
            self._stages = {key: self._halves(scratch, *key) for key in counts}

    def _staged_bytes(self, group: int, blocks: int) -> int:
        layout = self._pages.layout(group)
        return blocks * layout.tokens_per_block * layout.row_bytes

    def _halves(self, scratch: torch.Tensor, group: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scratch as two ``[blocks, elements of a block]`` areas, for K and for V."""
        half_bytes = self._staged_bytes(group, blocks) // 2
        dtype: torch.dtype = getattr(torch, self._pages.layout(group).dtype)
        keys, values = (scratch[start : start + half_bytes].view(dtype).view(blocks, -1) for start in (0, half_bytes))
        return keys, values

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        up_projection: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert up_projection is None
        sliding_window = self._pages.window_of(layer, sliding_window)
        plan = self._plan_of(layer)
        for page, computed in zip(self._pages.parts(layer), (key, value), strict=True):
            page.slots.index_copy_(0, plan.slots, computed[0].transpose(0, 1))
        if not plan.contexts:
            return self._decode(layer, query, scale, sliding_window)
        output = query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))
        for span in plan.contexts:
            rows = slice(span.start, span.start + span.tokens)
            output[:, rows] = self._context(layer, query, key, value, span, scale, sliding_window)
        if plan.decode is not None:
            rows = slice(query.shape[2] - plan.decode.sequences, query.shape[2])
            output[:, rows] = self._decode(layer, query[:, :, rows], scale, sliding_window)
        return output

    def _plan_of(self, layer: int) -> GroupPlan:
        assert self._plan is not None
        return self._plan.groups[self._pages.group_of(layer)]

    def _context(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        span: ContextSpan,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        rows = slice(span.start, span.start + span.tokens)
        piece = query[:, :, rows]
        own_keys, own_values = key[:, :, rows], value[:, :, rows]
        if window is not None and span.attended > window:
            return self._windowed_context(layer, piece, own_keys, own_values, span, scale, window)
        attended, own_weight = flash(piece, own_keys, own_values, causal=True, scale=scale)
        if span.prefix_tokens:
            keys, values = self._prefix(layer, span)
            before, prefix_weight = flash(piece, keys, values, causal=False, scale=scale)
            share = torch.sigmoid(prefix_weight - own_weight).to(attended.dtype)
            attended = attended.lerp(before, share[..., None])
        return attended.transpose(1, 2)

    def _windowed_context(
        self,
        layer: int,
        piece: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        span: ContextSpan,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        if span.prefix_tokens:
            keys, values = self._prefix(layer, span)
            own_keys, own_values = torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2)
        mask = _window_mask(span, window, piece)
        attended, _ = flash(piece, own_keys, own_values, causal=False, scale=scale, mask=mask)
        return attended.transpose(1, 2)

    def _prefix(self, layer: int, span: ContextSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[1, kv_heads, prefix, head_dim]`` of the tokens cached before this piece."""
        keys, values = self._stage(layer, span.prefix_blocks, 1)
        return keys[:, :, : span.prefix_tokens], values[:, :, : span.prefix_tokens]

    def _decode(self, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        decode = self._plan_of(layer).decode
        assert decode is not None
        if decode.captured:
            return self._captured_decode(layer, query, scale, window)
        keys, values = self._stage(layer, decode.blocks, decode.sequences)
        if decode.uniform:
            keys, values = keys[:, :, : decode.padded_tokens], values[:, :, : decode.padded_tokens]
        mask = self._decode_mask(layer, window, query)
        return grouped_attention(query, keys, values, scale=scale, mask=mask)

    def _captured_decode(self, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """The same through the operation that reads lengths when it runs."""
        decode = self._plan_of(layer).decode
        assert decode is not None
        keys, values = self._pages.parts(layer)
        output = query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))
        tokens_per_block = self._pages.layout(self._pages.group_of(layer)).tokens_per_block
        paged_decode()(
            query, keys.blocks, values.blocks, decode.blocks.view(decode.sequences, -1), decode.lengths,
            self._staging, output, tokens_per_block, scale, window or 0,
        )  # fmt: skip
        return output

    def _stage(self, layer: int, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather ``blocks`` of one layer; returns K and V ``[sequences, kv_heads, tokens, head_dim]`` in scratch."""
        group = self._pages.group_of(layer)
        keys, values = self._stages[group, blocks.numel()]
        for page, staged in zip(self._pages.parts(layer), (keys, values), strict=True):
            torch.index_select(page.blocks, 0, blocks, out=staged)
        shape = (sequences, -1, *self._pages.layout(group).parts[0])
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def _decode_mask(self, layer: int, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
        """Additive ``[sequences, 1, 1, padded]``; built once per step, group and window."""
        decode = self._plan_of(layer).decode
        assert decode is not None
        if window is not None and decode.longest <= window:
            window = None
        if window is None and decode.uniform:
            return None
        key = self._pages.group_of(layer), window
        if key not in self._masks:
            self._masks[key] = decode_mask(decode.lengths, decode.padded_tokens, window, query)
        return self._masks[key]


def _staged_blocks(plan: GroupPlan) -> list[int]:
    """How many blocks each part of the step stages at once."""
    blocks = [span.prefix_blocks.numel() for span in plan.contexts if span.prefix_blocks.numel()]
    return blocks if plan.decode is None else [*blocks, plan.decode.blocks.numel()]


def _window_mask(span: ContextSpan, window: int, query: torch.Tensor) -> torch.Tensor:
    """Additive ``[1, 1, tokens, attended]``: causal for a piece that ends at ``attended``, cut to the window."""
    keys = torch.arange(span.attended, device=query.device)
    queries = torch.arange(span.attended - span.tokens, span.attended, device=query.device)[:, None]
    return additive_mask((keys > queries) | (keys <= queries - window), query)[None, None]
