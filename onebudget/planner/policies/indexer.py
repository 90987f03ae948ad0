"""Sparse attention over a latent cache (DeepSeek-V3.2, GLM-5): a scorer with keys of its own chooses a few tokens.

The keys are kept for every token in 8 bits, with a scale of 32 bits for every 128 elements, on every rank. Sizes were
read in the sources of vLLM 0.11.0 to 0.31.0 and SGLang 0.5.16 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebudget.units import MIB

if TYPE_CHECKING:
    from onebudget.planner.policies.versions import EngineVersion

_SCALED = 128
_GATHERED_LENGTHS = 40
_UNPACKED_LENGTHS = 5
_LOGITS_BYTES = 512 * MIB
_TOP_K_BYTES = MIB

PACKED_LATENT = 656
"""Bytes per token of a latent in 8 bits with scales: 512 elements, 4 scales in 32 bits, and the rotary part in 16."""


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """``heads`` of ``dim`` elements score, ``chosen`` tokens are attended to. ``shared``: for each layer whether it
    takes the choice of one before it and needs no scorer."""

    heads: int
    dim: int
    chosen: int
    shared: tuple[bool, ...]

    @property
    def token_bytes(self) -> int:
        """One token's key and its scales, in one layer."""
        return self.dim + self.dim // _SCALED * 4

    def linear_parameters(self, query_rank: int) -> int:
        """Of one layer, on every rank, in the format of the model's linear layers."""
        return query_rank * self.heads * self.dim

    def plain_parameters(self, hidden: int) -> int:
        """Of one layer, in 16 bits: keys, the heads' weights, and the keys' norm with its bias."""
        return hidden * (self.dim + self.heads) + 2 * self.dim


def indexer_shape(whole: Callable[..., int], get: Callable[..., Any], layers: int) -> IndexerShape | None:
    """The scorer of a config with ``index_topk``, None without. Widths that a partial config leaves out are those of
    the families' public configuration classes."""
    chosen = whole("index_topk")
    if not chosen or not whole("kv_lora_rank"):
        return None
    heads = whole("index_n_heads") or (32 if str(get("model_type")).startswith("glm") else 64)
    return IndexerShape(heads, whole("index_head_dim") or 128, chosen, _shared(whole, get, layers))


def _shared(whole: Callable[..., int], get: Callable[..., Any], layers: int) -> tuple[bool, ...]:
    types = get("indexer_types")
    if isinstance(types, (list, tuple)) and len(types) >= layers:
        return tuple(str(kind) != "full" for kind in types[:layers])
    pattern = get("index_topk_pattern")
    if pattern:
        return tuple(index < len(pattern) and pattern[index] == "S" for index in range(layers))
    every = whole("index_topk_freq") or 1
    offset = get("index_skip_topk_offset", 2)
    return tuple(max(index - int(offset) + 1, 0) % every != 0 for index in range(layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerRoom:
    """Bytes that a profile holds for the scorer: ``kept`` in one workspace that every layer shares, ``passing`` while a
    layer chooses."""

    kept: int
    passing: int


def profile_room(
    shape: IndexerShape,
    *,
    length: int,
    batch_tokens: int,
    heads: int,
    row: int,
    packed: bool,
    version: EngineVersion,
) -> IndexerRoom:
    """What vLLM sets aside so that later steps fit. ``heads`` of one rank, ``row`` elements of a latent.

    Gathered keys of 40 longest requests share a room with queries joined to their latents and, where latents are
    packed, 5 longest requests unpacked. Queries count from 0.19 on, and so do the logits of a step.
    """
    late = version.at_least(0, 19)
    keys = _GATHERED_LENGTHS * length * shape.token_bytes + (_TOP_K_BYTES if late else 0)
    queries = batch_tokens * heads * row * 2 if late else 0
    unpacked = _UNPACKED_LENGTHS * length * row * 2 if packed and version.at_least(0, 13) else 0
    choice = batch_tokens * shape.chosen * 4
    return IndexerRoom(kept=max(keys, queries + unpacked) + choice, passing=_LOGITS_BYTES if late else 0)
