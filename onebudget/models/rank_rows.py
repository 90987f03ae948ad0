"""Rows of several ranks side by side: each rank attends to its own tokens, and layers behind attention see all of them.

A layer that is cut over the ranks needs the same input on each. Under attention data parallelism every rank has tokens
of its own, so the rows of all ranks are put together before such a layer, and each keeps its own afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class RankRows:
    """Packed tokens of each rank in one forward, in rank order, and whose place is ours."""

    tokens: tuple[int, ...]
    rank: int

    @property
    def total(self) -> int:
        return sum(self.tokens)

    @property
    def start(self) -> int:
        return sum(self.tokens[: self.rank])

    @property
    def own(self) -> int:
        return self.tokens[self.rank]


current_rows: ContextVar[RankRows] = ContextVar("current_rows")
"""Of the forward that runs now."""


def share_rows(layers: Iterable[torch.nn.Module]) -> None:
    """Let each of ``layers`` compute the rows of all ranks. They take hidden states ``[1, tokens, hidden]`` first, and
    give a tensor with rows in its last dimension but one, or a tuple that begins with it."""
    for layer in layers:
        layer.register_forward_pre_hook(_gather)
        layer.register_forward_hook(_keep_own)


def _gather(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """One sum of buffers that are zero but for the own rows: exact, and ranks may differ in tokens without padding."""
    rows, own = current_rows.get(), inputs[0]
    gathered = own.new_zeros((*own.shape[:-2], rows.total, own.shape[-1]))
    gathered.narrow(-2, rows.start, rows.own).copy_(own)
    dist.all_reduce(gathered)
    return (gathered, *inputs[1:])


def _keep_own(layer: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    rows = current_rows.get()
    if isinstance(output, tuple):
        return (output[0].narrow(-2, rows.start, rows.own), *output[1:])
    return output.narrow(-2, rows.start, rows.own)
