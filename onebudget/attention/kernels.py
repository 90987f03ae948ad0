"""The attention kernel of torch that our backends on stock operations share, and the mask it takes."""

from __future__ import annotations

import torch


def flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CPU flash kernel: the output and the log-sum-exp of each query.

    Query, keys and values ``[batch, heads, tokens, dim]`` share ``dim``; any strides will do as long as the last is 1.
    Called by name: on meta tensors ``F.scaled_dot_product_attention`` would pick another kernel than on CPU, and a dry
    run must allocate what the real run allocates.
    """
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return attended, weight


def additive_mask(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """0 where visible and minus infinity where hidden, in the dtype the kernel wants beside ``like``."""
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
