"""vLLM and attention to chosen tokens: how a latent is stored, by card and version, and what a profile sets aside.

Read in the sources of 0.11.0, 0.13.0, 0.15.1, 0.17.1, 0.19.1, 0.22.1, 0.24.0 to 0.28.0 and 0.31.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.planner.policies.indexer import PACKED_LATENT, IndexerRoom, profile_room
from onebudget.planner.policies.vllm.case import Case, cache_dtype, cached_bits

if TYPE_CHECKING:
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.policies.versions import EngineVersion

_FEW_HEADS = 16


def packed_latent(case: Case, tp: int) -> int:
    """Bytes of a token's latent where it is stored with scales, 0 where it is plain.

    An 8-bit cache is packed, but plain on cards of compute capability 10 whose kernels for it are preferred: from 0.17
    on with few heads, from 0.19 on always. Until 0.11 nothing asked for means packed too, and on capability 12 from
    0.28 on.
    """
    dims, version, sm = case.dims, case.version, case.request.gpu.sm
    if dims.indexer is None:
        return 0
    unasked = cache_dtype(case) in (None, "auto") and (
        not version.at_least(0, 12) or (version.at_least(0, 28) and sm is not None and sm >= 120)
    )
    if unasked:
        return PACKED_LATENT
    if cached_bits(case) != 8:
        return 0
    plain = sm is not None and 100 <= sm < 120 and _prefers_plain(dims, version, tp)
    return 0 if plain else PACKED_LATENT


def _prefers_plain(dims: Dims, version: EngineVersion, tp: int) -> bool:
    return version.at_least(0, 19) or (version.at_least(0, 17) and dims.heads // tp <= _FEW_HEADS)


def reserved_room(case: Case, tp: int) -> IndexerRoom | None:
    """What the profile sets aside for the scorer; None where no scorer chooses."""
    dims, limits = case.dims, case.limits
    if dims.indexer is None:
        return None
    return profile_room(
        dims.indexer, length=limits.max_len, batch_tokens=limits.batch_tokens, heads=dims.heads // tp,
        row=dims.kv_lora + dims.rope, packed=packed_latent(case, tp) > 0, version=case.version,
    )  # fmt: skip
