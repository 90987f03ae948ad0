"""Our paged attention inside transformers' models, through its attention interface.

No mask function is registered with it: transformers then builds no mask at all, which is its documented way for
engines that handle masking themselves. Step data travels in a context variable, because not every architecture
hands extra keyword arguments down to its attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from onebudget.attention.base import current_backend

ATTENTION_NAME = "onebudget"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: q ``[1, heads, tokens, dim]`` in, ``[1, tokens, heads, dim]`` out."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = current_backend.get().forward(layer, query, key, value, scale=scale, sliding_window=sliding_window)
    return output, None


def register() -> None:
    """Make ``attn_implementation="onebudget"`` known to transformers. Safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
