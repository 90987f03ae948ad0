"""The attention kernel of torch that our backends on stock operations share, and the mask it takes."""

from __future__ import annotations

import torch

from onebudget.units import align_up


def flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One of torch's fused kernels: the output and the log-sum-exp of each query.

    Query, keys and values ``[batch, heads, tokens, dim]`` share ``dim``; any strides will do as long as the last is 1.
    Called by name: on meta tensors ``F.scaled_dot_product_attention`` would pick another kernel than on the device, and
    a dry run must allocate what the real run allocates (it stands for the CPU).
    """
    if query.is_cuda:
        return _cuda_attention(query, keys, values, causal=causal, scale=scale, mask=mask)
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return attended, weight


def _cuda_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory-efficient kernel: float32 and 16-bit, with masks, but equal head counts, so K and V are expanded.

    It pads the log-sum-exp to whole tiles of queries and wants the mask expanded over rows of aligned length.
    """
    group = query.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if mask is not None:
        mask = _aligned(mask.expand(query.shape[0], query.shape[1], query.shape[2], keys.shape[2]))
    attended, weight, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, mask, True, 0.0, causal, scale=scale
    )
    return attended, weight[..., : query.shape[2]]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``mask`` with its last stride pattern padded to a multiple of 8 elements, as the kernel's vector loads want."""
    padded = align_up(mask.shape[-1], 8)
    storage = mask.new_zeros((*mask.shape[:-1], padded))
    storage[..., : mask.shape[-1]] = mask
    return storage[..., : mask.shape[-1]]


def additive_mask(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """0 where visible and minus infinity where hidden, in the dtype the kernel wants beside ``like``."""
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def decode_mask(lengths: torch.Tensor, padded_tokens: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive ``[sequences, 1, 1, padded_tokens]``: the last ``window`` of each sequence's ``lengths`` are seen."""
    positions = torch.arange(padded_tokens, device=like.device)
    ends = lengths[:, None]
    hidden = positions >= ends
    if window is not None:
        hidden = hidden | (positions < ends - window)
    return additive_mask(hidden, like)[:, None, None, :]


def grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """One query per sequence: query ``[1, heads, sequences, head_dim]``, keys and values
    ``[sequences, kv_heads, tokens, head_dim]``; returns ``[1, sequences, heads, head_dim]``.

    Query heads that share a KV head ride as rows of one query: K and V are read once for the whole group.
    """
    heads, sequences, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    grouped = query.view(kv_heads, heads // kv_heads, sequences, head_dim).permute(2, 0, 1, 3)
    attended, _ = flash(grouped, keys, values, causal=False, scale=scale, mask=mask)
    return attended.reshape(1, sequences, heads, head_dim)
