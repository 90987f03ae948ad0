"""Mixture-of-experts layers through transformers' experts interface, by grouped matrix products.

Grouped products have no operation whose shape depends on the routing, so a dry run allocates what the real run does,
and they read each expert's weights once; gathering weights per token would take a multiple of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from onebudget.graphs.recording import computed_beside
from onebudget.units import align_up

EXPERTS_NAME = "onebudget"
ROW_ALIGNMENT_BYTES = 16
"""Rows that a grouped product reads begin at multiples of this."""


class _GroupedShapes(TorchDispatchMode):
    """Results of grouped products on meta tensors: torch's own rule for them refuses every dtype but bfloat16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        rows, weights = args[0], args[1]
        stride = align_up(weights.shape[-1], ROW_ALIGNMENT_BYTES // rows.element_size())
        return computed_beside(rows.new_empty_strided((rows.shape[0], weights.shape[-1]), (stride, 1)))


def experts_forward(
    experts: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' signature of an experts implementation."""
    with _GroupedShapes() if hidden_states.is_meta else nullcontext():
        result: torch.Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return result


def register() -> None:
    """Make ``experts_implementation="onebudget"`` known to transformers. Safe to call again."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
