"""Multi-head latent attention over pages of latents.

A token is cached as one row of ``rank + rope_dim`` elements for all heads. Prompt pieces expand the latents they attend
to into keys and values per head, all pieces of a step in one pair of matrix products, so this workspace grows with the
sum of their attended tokens, and chunks do not bound it. Generating sequences need none of that: the up-projection of
the keys is applied to their queries and that of the values to their results, so they attend to staged latents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from onebudget.attention.base import AttentionBackend
from onebudget.attention.kernels import flash
from onebudget.attention.latent_scratch import FP8, Demand, LatentAreas, LatentRow, area_bytes, fixed_bytes
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from onebudget.attention.pages import PageGroup
    from onebudget.attention.plan import ContextSpan, DecodePlan, GroupPlan, StepPlan
    from onebudget.config import BudgetConfig
    from onebudget.models.facts import ModelFacts
    from onebudget.workspace import ScratchBuffer

_LARGEST_FP8 = torch.finfo(FP8).max
_PARTS_OF_A_PIECE = 2


class LatentBackend(AttentionBackend):
    name: ClassVar[str] = "mla"
    profiles_full_cache: ClassVar[bool] = False  # pieces are attended in halves, masks lie in scratch
    supports_workspace_reclamation: ClassVar[bool] = True
    kv_dtypes: ClassVar[frozenset[str]] = frozenset({"auto", "fp8_e4m3"})

    def __init__(self, groups: Sequence[PageGroup], scratch: ScratchBuffer, model: ModelFacts, dtype: str) -> None:
        super().__init__(groups, scratch, model, dtype)
        assert len(groups) == 1  # models with latent attention have no windows
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._row = _row(model, self._dtype.itemsize, fp8=self._pages.layout(0).dtype != dtype)
        self._plan: GroupPlan | None = None
        self._areas: LatentAreas | None = None

    @classmethod
    def workspace_bytes_per_token(cls, model: ModelFacts, element_bytes: int) -> int:
        """Keys and values of every head for one attended token."""
        return _row(model, element_bytes, fp8=False).expanded_bytes

    @classmethod
    def workspace_is_chunk_bounded(cls, model: ModelFacts) -> bool:
        """No: a later chunk expands its whole prefix again."""
        return False

    @classmethod
    def workspace_fixed_bytes(cls, model: ModelFacts, element_bytes: int, config: BudgetConfig) -> int:
        """Staged latents, absorbed queries and masks of a full batch of the longest sequences."""
        return fixed_bytes(_row(model, element_bytes, fp8=config.kv_cache_dtype == "fp8_e4m3"), config)

    @classmethod
    def page_parts(cls, model: ModelFacts) -> tuple[tuple[int, ...], ...]:
        return ((model.latent_dim,),)

    def begin(self, plan: StepPlan) -> None:
        self._plan = step = plan.groups[0]
        self._areas = None
        demand = Demand.of_step(step, self._pages.layout(0).tokens_per_block)
        owner = "context_workspace" if demand.expanded else "fixed_workspace"
        scratch = self._scratch.require(sum(area_bytes(self._row, demand).values()), owner=owner)
        self._areas = LatentAreas(scratch, self._row, demand, self._dtype)
        if step.decode is not None:
            self._areas.fill_mask(step.decode)

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
        plan, shape = self._plan, self._row.shape
        assert plan is not None and up_projection is not None and sliding_window is None
        heads, tokens = query.shape[1], query.shape[2]
        assert heads == self._row.heads
        latents = self._write(layer, key[0, 0], value[0, 0])
        per_head = up_projection.view(heads, shape.nope_dim + shape.value_dim, shape.rank)
        up_keys, up_values = per_head.split([shape.nope_dim, shape.value_dim], dim=1)
        output = query.new_empty((1, tokens, heads, shape.value_dim))
        if plan.contexts:
            self._stage_contexts(layer, latents)
            self._expand(up_keys, up_values)
            self._attend_contexts(query, output, scale)
        if plan.decode is not None:
            rows = slice(tokens - plan.decode.sequences, tokens)
            self._decode(layer, query[0, :, rows], output[0, rows], up_keys, up_values, scale)
        return output

    def _write(self, layer: int, compressed: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts of the step's latents as they are stored, also written to their pages."""
        assert self._plan is not None
        stored = (self._stored(compressed), self._stored(rotary))
        page = self._as_stored(self._pages.parts(layer)[0].slots)
        for columns, part in zip(self._parts(page), stored, strict=True):
            columns.index_copy_(0, self._plan.slots, self._as_stored(part))
        return stored

    def _stored(self, part: torch.Tensor) -> torch.Tensor:
        # Whether a conversion to FP8 saturates or gives NaN beyond its range depends on the version and the kernel.
        return part.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(FP8) if self._row.fp8 else part

    def _as_stored(self, stored: torch.Tensor) -> torch.Tensor:
        """FP8 as plain bytes, because not every copy operation knows it."""
        return stored.view(torch.uint8) if self._row.fp8 else stored

    def _parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """The compressed and the rotary columns of latents ``[rows, cached_dim]``."""
        columns: Sequence[torch.Tensor] = rows.split([self._row.shape.rank, self._row.shape.rope_dim], 1)
        return columns

    def _stage_contexts(self, layer: int, latents: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Attended latents of all pieces, one after the other: each cached prefix, then the piece's own.

        Own latents are taken as stored, so that a token counts the same whether it is computed now or was cached.
        """
        assert self._areas is not None
        for start, span in self._spans():
            if span.prefix_tokens:
                self._stage(layer, span.prefix_blocks, start)
            rows = self._areas.staged[start + span.prefix_tokens : start + span.attended]
            for columns, part in zip(self._parts(rows), latents, strict=True):
                columns.copy_(part[span.start : span.start + span.tokens])

    def _spans(self) -> Iterator[tuple[int, ContextSpan]]:
        """Every prompt piece with its first row among the staged and the expanded ones."""
        assert self._plan is not None
        start = 0
        for span in self._plan.contexts:
            yield start, span
            start += span.attended

    def _stage(self, layer: int, blocks: torch.Tensor, start: int) -> None:
        """Gather whole blocks of one layer into the staged rows from ``start`` on."""
        assert self._areas is not None
        page, count = self._pages.parts(layer)[0].blocks, blocks.numel()
        rows = slice(start, start + count * self._pages.layout(0).tokens_per_block)
        staged, packed = self._areas.staged[rows], self._areas.packed
        if packed is None:
            torch.index_select(page, 0, blocks, out=staged.view(count, -1))
        else:
            torch.index_select(self._as_stored(page), 0, blocks, out=packed[rows].view(count, -1))
            staged.copy_(packed[rows].view(FP8))

    def _expand(self, up_keys: torch.Tensor, up_values: torch.Tensor) -> None:
        assert self._areas is not None
        shape, expanded = self._row.shape, self._areas.expanded
        compressed, rotary = self._parts(self._areas.staged[: expanded.shape[1]])
        shared = compressed.expand(self._row.heads, -1, -1)
        torch.bmm(shared, up_keys.transpose(1, 2), out=expanded[..., : shape.nope_dim])
        torch.bmm(shared, up_values.transpose(1, 2), out=expanded[..., shape.key_dim :])
        expanded[..., shape.nope_dim : shape.key_dim].copy_(rotary)

    def _attend_contexts(self, query: torch.Tensor, output: torch.Tensor, scale: float) -> None:
        for start, span in self._spans():
            size = ceil_div(span.tokens, _PARTS_OF_A_PIECE)
            for begun in range(0, span.tokens, size):
                rows = slice(span.start + begun, span.start + min(begun + size, span.tokens))
                self._attend(query[:, :, rows], output[:, rows], start, span.prefix_tokens + begun, scale)

    def _attend(self, piece: torch.Tensor, output: torch.Tensor, start: int, seen: int, scale: float) -> None:
        """Part of a prompt piece: causal over itself, all of the ``seen`` tokens before it, merged by log-sum-exp.

        Pieces come in parts so that the two results at a time take no more than one of the whole piece would. A piece
        behind a long prefix then takes what the same piece without one took in the profile.
        """
        assert self._areas is not None
        tokens = piece.shape[2]
        keys, values = self._areas.keys(start + seen, tokens), self._areas.values(start + seen, tokens)
        attended, own_weight = flash(piece, keys, values, causal=True, scale=scale)
        if seen:
            keys, values = self._areas.keys(start, seen), self._areas.values(start, seen)
            before, seen_weight = flash(piece, keys, values, causal=False, scale=scale)
            share = torch.sigmoid(seen_weight - own_weight).to(attended.dtype)
            attended.lerp_(before, share[..., None])
        output.copy_(attended[..., : self._row.shape.value_dim].transpose(1, 2))

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        output: torch.Tensor,
        up_keys: torch.Tensor,
        up_values: torch.Tensor,
        scale: float,
    ) -> None:
        """query ``[heads, sequences, key_dim]``, output ``[sequences, heads, value_dim]``."""
        assert self._plan is not None and self._plan.decode is not None and self._areas is not None
        decode, shape, areas = self._plan.decode, self._row.shape, self._areas
        self._stage(layer, decode.blocks, 0)
        latents = self._latents(decode)
        torch.bmm(query[..., : shape.nope_dim], up_keys, out=areas.absorbed[..., : shape.rank].transpose(0, 1))
        areas.absorbed[..., shape.rank :].copy_(query[..., shape.nope_dim :].transpose(0, 1))
        mask = None if areas.mask is None else areas.mask[:, None, None]
        # All heads share one latent per token, so they ride as rows of one query.
        attended, _ = flash(areas.absorbed[:, None], latents, latents, causal=False, scale=scale, mask=mask)
        compressed = attended[:, 0, :, : shape.rank].transpose(0, 1)
        torch.bmm(compressed, up_values.transpose(1, 2), out=output.transpose(0, 1))

    def _latents(self, decode: DecodePlan) -> torch.Tensor:
        """The staged latents ``[sequences, 1, padded tokens, cached_dim]``."""
        assert self._areas is not None
        rows = decode.blocks.numel() * self._pages.layout(0).tokens_per_block
        latents = self._areas.staged[:rows].view(decode.sequences, 1, -1, self._row.shape.cached_dim)
        return latents[:, :, : decode.padded_tokens] if decode.uniform else latents


def _row(model: ModelFacts, element_bytes: int, *, fp8: bool) -> LatentRow:
    assert model.latent is not None
    return LatentRow(model.latent, model.num_heads, element_bytes, fp8)
