"""The scratch of latent attention: how one step cuts it up, and the most that any step needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.attention.plan import DecodePlan, GroupPlan
    from onebudget.config import BudgetConfig
    from onebudget.models.facts import LatentShape

_ALIGNMENT_BYTES = 64
_POSITION_BYTES = 8
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class LatentRow:
    """Sizes in elements of one cached row and what it expands to, and in bytes of an element of the computing dtype.

    An expanded row ``[key without position | rotary key | value]`` belongs to one head and one token.
    """

    shape: LatentShape
    heads: int
    element_bytes: int
    fp8: bool

    @property
    def expanded_dim(self) -> int:
        return self.shape.key_dim + self.shape.value_dim

    @property
    def expanded_bytes(self) -> int:
        """All heads of one attended token."""
        return self.heads * self.expanded_dim * self.element_bytes

    @property
    def tail_bytes(self) -> int:
        """What the value view of the last expanded row reads beyond it, because it is as wide as a key."""
        return max(0, self.shape.key_dim - self.shape.value_dim) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step stages: ``rows`` of latents; the queries of ``sequences`` that generate, with a mask over
    ``masked_rows`` of them at ``positions``; and ``expanded`` tokens of prompt pieces."""

    rows: int
    sequences: int = 0
    masked_rows: int = 0
    positions: int = 0
    expanded: int = 0

    @classmethod
    def of_step(cls, plan: GroupPlan, tokens_per_block: int) -> Demand:
        rows = start = 0
        for span in plan.contexts:
            # Gathered by whole blocks; what a block holds beyond the prefix is overwritten by what follows.
            rows = max(rows, start + max(span.attended, span.prefix_blocks.numel() * tokens_per_block))
            start += span.attended
        decode = plan.decode
        if decode is None:
            return cls(rows, expanded=start)
        staged = decode.blocks.numel() * tokens_per_block
        masked = 0 if decode.uniform else staged
        return cls(max(rows, staged), decode.sequences, masked, masked // decode.sequences, start)

    @classmethod
    def largest_fixed(cls, config: BudgetConfig) -> Demand:
        """The most of everything that does not grow with attended tokens: every seat at ``max_seq_len``."""
        positions = align_up(config.max_seq_len, config.tokens_per_block)
        rows = config.max_batch_size * positions
        return cls(rows, config.max_batch_size, rows, positions)


def area_bytes(row: LatentRow, demand: Demand) -> dict[str, int]:
    """Bytes of each area in the order they lie in, the one that grows with attended tokens last."""
    cached, element = row.shape.cached_dim, row.element_bytes
    fixed = {
        "packed": demand.rows * cached if row.fp8 else 0,
        "staged": demand.rows * cached * element,
        "absorbed": demand.sequences * row.heads * cached * element,
        "mask": demand.masked_rows * element,
        "hidden": demand.masked_rows,
        "positions": demand.positions * _POSITION_BYTES,
    }
    areas = {name: align_up(nbytes, _ALIGNMENT_BYTES) for name, nbytes in fixed.items()}
    areas["expanded"] = demand.expanded * row.expanded_bytes + (row.tail_bytes if demand.expanded else 0)
    return areas


def fixed_bytes(row: LatentRow, config: BudgetConfig) -> int:
    """The most that any step takes beyond its expanded rows.

    The last summand stands outside the scratch: the kernel's result for the absorbed queries, wider than any other
    attention result and first seen when sequences generate.
    """
    areas = area_bytes(row, Demand.largest_fixed(config))
    return sum(areas.values()) + row.tail_bytes + areas["absorbed"]


class LatentAreas:
    """One step's areas as views of the scratch.

    ``staged`` ``[rows, cached_dim]`` are latents in the computing dtype, ``packed`` the same rows as FP8 stores them.
    ``absorbed`` ``[sequences, heads, cached_dim]`` are queries against latents; ``mask`` ``[sequences, positions]``
    hides the padding of short sequences, None when there is none.
    """

    def __init__(self, scratch: torch.Tensor, row: LatentRow, demand: Demand, dtype: torch.dtype) -> None:
        self._row = row
        self._demand = demand
        cuts = scratch.split(list(area_bytes(row, demand).values()))
        packed, staged, absorbed, mask, hidden, positions, expanded = cuts
        cached = row.shape.cached_dim
        self.staged = _as(staged, dtype, demand.rows, cached)
        self.packed = _as(packed, torch.uint8, demand.rows, cached) if row.fp8 else None
        self.absorbed = _as(absorbed, dtype, demand.sequences, row.heads, cached)
        self.mask = _as(mask, dtype, demand.sequences, demand.positions) if demand.positions else None
        self._hidden = _as(hidden, torch.bool, demand.sequences, demand.positions)
        self._positions = _as(positions, torch.int64, demand.positions)
        self._expanded = expanded.view(dtype)

    def fill_mask(self, decode: DecodePlan) -> None:
        """Minus infinity at every padded position, 0 elsewhere."""
        if self.mask is not None:
            torch.arange(self._demand.positions, out=self._positions)
            torch.ge(self._positions, decode.lengths[:, None], out=self._hidden)
            self.mask.zero_().masked_fill_(self._hidden, float("-inf"))

    @property
    def expanded(self) -> torch.Tensor:
        """``[heads, expanded tokens, expanded_dim]``."""
        return self._rows(0, self._demand.expanded, 0, self._row.expanded_dim)

    def keys(self, start: int, tokens: int) -> torch.Tensor:
        """``[1, heads, tokens, key_dim]`` of the expanded tokens from ``start`` on."""
        return self._rows(start, tokens, 0, self._row.shape.key_dim)[None]

    def values(self, start: int, tokens: int) -> torch.Tensor:
        """Like ``keys``, and as wide, because the kernel wants it so: what lies behind ``value_dim`` is the start of
        the next row, and the result has as many columns too many."""
        return self._rows(start, tokens, self._row.shape.key_dim, self._row.shape.key_dim)[None]

    def _rows(self, start: int, tokens: int, offset: int, width: int) -> torch.Tensor:
        per_row = self._row.expanded_dim
        shape, strides = (self._row.heads, tokens, width), (self._demand.expanded * per_row, per_row, 1)
        first = self._expanded.storage_offset() + start * per_row + offset
        rows: torch.Tensor = self._expanded.as_strided(shape, strides, first)
        return rows


def _as(area: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The start of a byte area as a tensor of that type and shape."""
    tensor: torch.Tensor = area[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return tensor
