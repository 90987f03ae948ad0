"""Static device inputs of a step: written in place, never replaced."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from onebudget.attention.plan import ContextSpan, DecodePlan, GroupPlan, StepPlan
from onebudget.core import RequestState
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onebudget.attention.pages import PageGroup
    from onebudget.buffers import Buffer, BufferManager
    from onebudget.config import BudgetConfig
    from onebudget.core import Request, ScheduledBatch

OWNER = "static_inputs"


class StaticInputs:
    """Device tensors of the largest step, int64: ids and positions per token; KV slots per token and block tables per
    sequence of each of ``groups``; and the tokens that the last step sampled, which the next one may start from before
    the host has read them."""

    def __init__(self, manager: BufferManager, config: BudgetConfig, groups: Sequence[PageGroup]) -> None:
        self._tokens_per_block = config.tokens_per_block
        self._manager = manager
        self._config = config
        self._groups = groups
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; also after it was lost."""
        config = self._config
        blocks = ceil_div(config.max_seq_len, config.tokens_per_block)
        self.buffers: list[Buffer] = []
        with ExitStack() as undo:

            def take(elements: int) -> torch.Tensor:
                buffer = self._manager.gpu(elements, "int64", owner=OWNER)
                undo.callback(buffer.release)
                self.buffers.append(buffer)
                return buffer.as_tensor()

            self.token_ids = take(config.max_num_tokens)
            self.positions = take(config.max_num_tokens)
            self.last_rows = take(config.max_batch_size)
            self.sampled = take(config.max_batch_size)
            self._tables = [
                _GroupInputs(
                    slots=take(config.max_num_tokens),
                    lengths=take(config.max_batch_size),
                    blocks=take(config.max_batch_size * blocks),
                    prefix_blocks=take(config.max_batch_size * blocks),
                )
                for _ in self._groups
            ]
            undo.pop_all()

    def release(self) -> None:
        del self.token_ids, self.positions, self.last_rows, self.sampled, self._tables
        for buffer in self.buffers:
            buffer.release()
        self.buffers = []

    def fill(self, batch: ScheduledBatch) -> tuple[int, int, StepPlan]:
        """Write one step; returns packed tokens, rows to sample, and what attention needs to know."""
        token_ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for request in batch.context:
            token_ids += request.tokens_of_step()
            positions += _reached(request)
            if request.is_last_chunk:
                last_rows.append(len(token_ids) - 1)
        for request in batch.generation:
            last_rows.append(len(token_ids))
            token_ids += request.tokens_of_step()
            positions.append(request.computed_tokens)
        write(self.token_ids, token_ids)
        self.place_sampled(self.token_ids, len(token_ids) - len(batch.generation), batch.generation)
        write(self.positions, positions)
        write(self.last_rows, last_rows)
        plan = StepPlan(tuple(map(self._group_plan, self._groups, self._tables, repeat(batch))))
        return len(token_ids), len(last_rows), plan

    def place_sampled(self, token_ids: torch.Tensor, start: int, generation: Sequence[Request]) -> None:
        """Write the tokens that only the device knows among those of ``generation``, which stand from ``start`` on."""
        known = [(start + at, r.pending_row) for at, r in enumerate(generation) if r.pending_row is not None]
        if known:
            index = torch.tensor(known, dtype=torch.int64).to(token_ids.device)
            token_ids[index[:, 0]] = self.sampled[index[:, 1]].to(token_ids.dtype)

    def _group_plan(self, group: PageGroup, inputs: _GroupInputs, batch: ScheduledBatch) -> GroupPlan:
        slots: list[int] = []
        contexts: list[ContextSpan] = []
        prefix_start = 0
        for request in batch.context:
            span, prefix_start = self._context_span(request, len(slots), prefix_start, group, inputs)
            contexts.append(span)
            slots += slots_of(group.block_table(request), _reached(request), self._tokens_per_block)
        for request in batch.generation:
            slots += slots_of(group.block_table(request), _reached(request), self._tokens_per_block)
        decode = self._decode_plan(batch.generation, group, inputs) if batch.generation else None
        return GroupPlan(write(inputs.slots, slots), contexts, decode)

    def _context_span(
        self, request: Request, start: int, prefix_start: int, group: PageGroup, inputs: _GroupInputs
    ) -> tuple[ContextSpan, int]:
        first, cached = group.first_block(request), request.computed_tokens
        prefix = group.block_table(request)[first : ceil_div(cached, self._tokens_per_block)]
        blocks = write(inputs.prefix_blocks[prefix_start:], prefix)
        attended = cached + request.chunk_tokens - first * self._tokens_per_block
        return ContextSpan(start, request.chunk_tokens, attended, blocks), prefix_start + len(prefix)

    def _decode_plan(self, generation: list[Request], group: PageGroup, inputs: _GroupInputs) -> DecodePlan:
        lengths, tables = decode_tables(generation, group, self._tokens_per_block)
        padded = len(tables[0]) * self._tokens_per_block
        uniform = len(lengths) == 1 or all(length == padded for length in lengths)
        return DecodePlan(
            sequences=len(generation),
            padded_tokens=lengths[0] if len(lengths) == 1 else padded,
            longest=max(lengths),
            lengths=write(inputs.lengths, lengths),
            blocks=write(inputs.blocks, [block for table in tables for block in table]),
            uniform=uniform,
        )


@dataclass(frozen=True, slots=True)
class _GroupInputs:
    slots: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    prefix_blocks: torch.Tensor


def decode_tables(
    generation: Sequence[Request], group: PageGroup, tokens_per_block: int
) -> tuple[list[int], list[list[int]]]:
    """Attended tokens of each sequence, the new one included, and the blocks they stand in, all tables equally long.

    Both count from the first block that is still there.
    """
    firsts = [group.first_block(request) for request in generation]
    lengths = [
        request.computed_tokens + 1 - first * tokens_per_block
        for request, first in zip(generation, firsts, strict=True)
    ]
    width = ceil_div(max(lengths), tokens_per_block)
    tables = [
        group.block_table(request)[first : first + width] for request, first in zip(generation, firsts, strict=True)
    ]
    # Padding names a block of the sequence itself: any other may hold no numbers yet.
    return lengths, [table + table[:1] * (width - len(table)) for table in tables]


def _reached(request: Request) -> range:
    """Positions this step computes."""
    tokens = request.chunk_tokens if request.state is not RequestState.GENERATION else 1
    return range(request.computed_tokens, request.computed_tokens + tokens)


def slots_of(table: list[int], reached: range, tokens_per_block: int) -> list[int]:
    return [
        table[position // tokens_per_block] * tokens_per_block + position % tokens_per_block for position in reached
    ]


def write(target: torch.Tensor, values: list[int]) -> torch.Tensor:
    """The first elements of ``target``, set to ``values``."""
    view = target[: len(values)]
    view.copy_(torch.tensor(values, dtype=target.dtype))
    return view
