"""Static device inputs of a step: written in place, never replaced."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from onebudget.attention.plan import ContextSpan, DecodePlan, StepPlan
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager
    from onebudget.config import BudgetConfig
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.kv.manager import KVCacheManager

OWNER = "static_inputs"


class StaticInputs:
    """Device tensors of the largest step, int64: ids, positions and KV slots per token, block tables per sequence."""

    def __init__(self, manager: BufferManager, config: BudgetConfig) -> None:
        self._tokens_per_block = config.tokens_per_block
        self._manager = manager
        self._config = config
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
            self.slots = take(config.max_num_tokens)
            self.last_rows = take(config.max_batch_size)
            self.lengths = take(config.max_batch_size)
            self.blocks = take(config.max_batch_size * blocks)
            self.prefix_blocks = take(config.max_batch_size * blocks)
            undo.pop_all()

    def release(self) -> None:
        del self.token_ids, self.positions, self.slots, self.last_rows, self.lengths, self.blocks, self.prefix_blocks
        for buffer in self.buffers:
            buffer.release()
        self.buffers = []

    def fill(self, batch: ScheduledBatch, kv: KVCacheManager) -> tuple[int, int, StepPlan]:
        """Write one step; returns packed tokens, rows to sample, and what attention needs to know."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        contexts: list[ContextSpan] = []
        prefix_start = 0
        for request in batch.context:
            span, prefix_start = self._context_span(request, len(token_ids), prefix_start, kv)
            contexts.append(span)
            token_ids += request.tokens_of_step()
            reached = range(request.computed_tokens, request.computed_tokens + request.chunk_tokens)
            positions += reached
            slots += self._slots(kv.block_table(request), reached)
            if request.is_last_chunk:
                last_rows.append(len(token_ids) - 1)
        for request in batch.generation:
            last_rows.append(len(token_ids))
            token_ids.append(request.output_token_ids[-1])
            positions.append(request.computed_tokens)
            slots += self._slots(kv.block_table(request), range(request.computed_tokens, request.computed_tokens + 1))
        _write(self.token_ids, token_ids)
        _write(self.positions, positions)
        _write(self.last_rows, last_rows)
        plan = StepPlan(_write(self.slots, slots), contexts, self._decode_plan(batch.generation, kv))
        return len(token_ids), len(last_rows), plan

    def _slots(self, table: list[int], reached: range) -> list[int]:
        size = self._tokens_per_block
        return [table[position // size] * size + position % size for position in reached]

    def _context_span(
        self, request: Request, start: int, prefix_start: int, kv: KVCacheManager
    ) -> tuple[ContextSpan, int]:
        prefix = kv.block_table(request)[: ceil_div(request.computed_tokens, self._tokens_per_block)]
        blocks = _write(self.prefix_blocks[prefix_start:], prefix)
        attended = request.computed_tokens + request.chunk_tokens
        return ContextSpan(start, request.chunk_tokens, attended, blocks), prefix_start + len(prefix)

    def _decode_plan(self, generation: list[Request], kv: KVCacheManager) -> DecodePlan | None:
        if not generation:
            return None
        lengths = [request.computed_tokens + 1 for request in generation]
        width = ceil_div(max(lengths), self._tokens_per_block)
        rows = (kv.block_table(request)[:width] for request in generation)
        # Padding names a block of the sequence itself: any other may hold no numbers yet.
        tables = [block for row in rows for block in row + row[:1] * (width - len(row))]
        padded = width * self._tokens_per_block
        uniform = len(lengths) == 1 or all(length == padded for length in lengths)
        return DecodePlan(
            sequences=len(generation),
            padded_tokens=lengths[0] if len(lengths) == 1 else padded,
            longest=max(lengths),
            lengths=_write(self.lengths, lengths),
            blocks=_write(self.blocks, tables),
            uniform=uniform,
        )


def _write(target: torch.Tensor, values: list[int]) -> torch.Tensor:
    view = target[: len(values)]
    view.copy_(torch.tensor(values, dtype=torch.int64))
    return view
