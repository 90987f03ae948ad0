"""Attention over compressed caches (DeepSeek-V4): layers keep every 4th or 128th token and a short window besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FAMILY = "deepseek_v4"
_RATIOS = (4, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedShape:
    """``ratios``: tokens per kept entry of each layer, 0 for a layer with only its window. ``index_heads`` and
    ``index_dim``: the scorer that chooses entries where 4 tokens share one. ``output_rank`` and ``output_groups``: the
    low-rank output projection. ``streams``: parallel residual streams."""

    ratios: tuple[int, ...]
    window: int
    rope: int
    query_rank: int
    output_rank: int
    output_groups: int
    index_heads: int
    index_dim: int
    streams: int

    def layers_of(self, ratio: int) -> int:
        return sum(1 for each in self.ratios if each == ratio)


def is_compressed(family: str) -> bool:
    return family.startswith(_FAMILY)


def compressed_shape(whole: Callable[..., int], get: Callable[..., Any], layers: int) -> CompressedShape:
    """The shape from a config's keys. What partial configs leave out takes the defaults of the family's public
    configuration class; the pattern of layers is that of the published smaller model: two with a window only, then 4
    and 128 in turn."""
    given = get("compress_ratios")
    ratios = [int(ratio) for ratio in given] if isinstance(given, (list, tuple)) else []
    if len(ratios) < layers:
        ratios = [0, 0] + [_RATIOS[index % 2] for index in range(max(layers - 2, 0))]
    return CompressedShape(
        ratios=tuple(ratios[:layers]), window=whole("sliding_window") or 128, rope=whole("qk_rope_head_dim") or 64,
        query_rank=whole("q_lora_rank") or 1024, output_rank=whole("o_lora_rank") or 1024,
        output_groups=whole("o_groups") or 8, index_heads=whole("index_n_heads") or 64,
        index_dim=whole("index_head_dim") or 128, streams=whole("hc_mult") or 4,
    )  # fmt: skip
