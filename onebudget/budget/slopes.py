"""What a token of KV costs on one rank, from plain numbers of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onebudget.budget.cost import CacheCost
from onebudget.errors import ConfigError
from onebudget.units import align_up, ceil_div

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
NVFP4_SCALE_BLOCK = 16
"""Elements that share one scale byte in NVFP4."""


def attention_elements_per_token(
    *, layers: int, kv_heads: int | Sequence[int], head_dim: int, tp_size: int = 1, attention_dp: bool = False
) -> int:
    """Elements of K and V per token over all layers of this rank.

    ``kv_heads`` may be given per layer. Tensor parallelism divides heads and keeps at least one each; under attention
    data parallelism every rank holds all of them. A pipeline rank without layers is charged one.
    """
    ranks = 1 if attention_dp else tp_size
    if isinstance(kv_heads, int):
        heads = max(layers, 1) * ceil_div(kv_heads, ranks)
    else:
        heads = sum(ceil_div(each, ranks) for each in kv_heads)
    return 2 * head_dim * heads


def mla_elements_per_token(*, layers: int, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Elements of the latent cache per token: one latent and one rotary key a layer, the same on every rank."""
    return max(layers, 1) * (kv_lora_rank + qk_rope_head_dim)


def kv_bytes_per_token(elements: int, kv_dtype: str) -> int:
    """Bytes of ``elements`` cache elements. NVFP4 packs two in a byte and adds a pool of one scale byte per 16
    elements."""
    if kv_dtype == "nvfp4":
        return ceil_div(elements, 2) + ceil_div(elements, NVFP4_SCALE_BLOCK)
    if kv_dtype not in _ELEMENT_BYTES:
        raise ConfigError.for_field("kv_dtype", kv_dtype, f"one of {', '.join([*_ELEMENT_BYTES, 'nvfp4'])}")
    return elements * _ELEMENT_BYTES[kv_dtype]


def recurrent_cost(
    *,
    attention_bytes_per_token: int,
    state_bytes: int,
    max_batch_size: int,
    pp_size: int = 1,
    snapshot_interval: int | None = None,
) -> CacheCost:
    """Cost of a model with recurrent layers: a state per seat up front, and one snapshot every ``snapshot_interval``
    tokens (None or 0: no snapshots). ``state_bytes``: all recurrent layers of this rank, one sequence."""
    snapshots = state_bytes // snapshot_interval if snapshot_interval else 0
    return CacheCost(attention_bytes_per_token + snapshots, max_batch_size * pp_size * state_bytes)


def windowed_cost(
    *,
    full_bytes_per_token: int,
    windows: Iterable[tuple[int, int]],
    tokens_per_block: int,
    max_batch_size: int,
) -> CacheCost:
    """Cost for the v2 manager of a model with sliding windows, given as ``(window_tokens, bytes_per_token)`` pairs:
    layers with a window hold whole blocks of it for each request, layers without one grow with the tokens."""
    per_request = sum(align_up(window, tokens_per_block) * each for window, each in windows)
    return CacheCost(full_bytes_per_token, max_batch_size * per_request)
