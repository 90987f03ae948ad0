"""Decode attention as one operation of torch's dispatcher, with lengths that are read when it runs.

A graph freezes every number Python puts into its calls. Attention over growing sequences needs one that changes, so it
lies in a tensor and the kernel reads it: one graph serves all lengths, and work follows the longest sequence. Where the
device can't hand the host a value inside a graph, the kernel runs over the whole width of the tables instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from onebudget.attention.kernels import decode_mask, grouped_attention
from onebudget.device.meter import ALLOCATOR_ROUNDING_BYTES
from onebudget.units import align_up, ceil_div

_SCHEMA = (
    "paged_decode(Tensor query, Tensor keys, Tensor values, Tensor blocks, Tensor lengths, Tensor(a!) staging, "
    "Tensor(b!) output, int tokens_per_block, float scale, int window) -> ()"
)


@cache
def paged_decode() -> Any:
    """The operation ``onebudget::paged_decode``, defined at the first call.

    query ``[1, heads, sequences, head_dim]``; keys and values ``[blocks, elements of a block]``, the pages of a layer;
    blocks int32 ``[sequences, width]``, unused entries naming any block that holds numbers; lengths int32
    ``[sequences]``; staging uint8, at least ``width`` blocks of K and V per sequence; output
    ``[1, sequences, heads, head_dim]``; window 0 for none.
    """
    library = torch.library.Library("onebudget", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("paged_decode", _decode, "CPU")
    library.impl("paged_decode", _decode, "CUDA")
    library.impl("paged_decode", _shapes_only, "Meta")
    _libraries.append(library)
    return torch.ops.onebudget.paged_decode.default


_libraries: list[torch.library.Library] = []  # a library undefines its operations when it is dropped


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    staging: torch.Tensor,
    output: torch.Tensor,
    tokens_per_block: int,
    scale: float,
    window: int,
) -> None:
    sequences, width = blocks.shape
    longest, shortest = width * tokens_per_block, 0
    if not blocks.is_cuda:
        known = lengths.tolist()
        longest, shortest = max(known), min(known)
        width = ceil_div(longest, tokens_per_block)
    padded = longest if sequences == 1 else width * tokens_per_block
    half = sequences * width * keys.shape[1]
    area = staging[: 2 * half * keys.element_size()].view(keys.dtype)
    chosen = blocks[:, :width].reshape(-1)
    shape = (sequences, width * tokens_per_block, -1, query.shape[3])
    staged = []
    for page, start in ((keys, 0), (values, half)):
        rows = area[start : start + half].view(-1, page.shape[1])
        torch.index_select(page, 0, chosen, out=rows)
        staged.append(rows.view(shape).transpose(1, 2)[:, :, :padded])
    hides = 0 < window < longest
    mask = decode_mask(lengths, padded, window if hides else None, query) if hides or shortest < padded else None
    output.copy_(grouped_attention(query, *staged, scale=scale, mask=mask))


def _shapes_only(*_: Any) -> None:
    """Nothing is made, and there is nothing to compute."""


def workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """What an operation of ours takes beside its arguments while it runs, at the most: result and log-sum-exp of the
    kernel; the chosen blocks; positions, what they hide (twice with a window) and the mask."""
    if operation is not paged_decode():
        return 0
    query, blocks, tokens_per_block, window = args[0], args[3], args[7], args[9]
    rows, positions = blocks.shape[0] * query.shape[1], blocks.shape[1] * tokens_per_block
    hidden = blocks.shape[0] * positions
    parts = [query.numel() * query.element_size(), rows * 4, blocks.numel() * blocks.element_size(), positions * 8]
    parts += [hidden * query.element_size(), *[hidden] * (3 if window else 1)]
    return sum(align_up(part, ALLOCATOR_ROUNDING_BYTES) for part in parts)
