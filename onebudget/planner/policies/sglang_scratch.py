"""SGLang's attention workspace: a fixed size, whatever heads and requests need of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebudget.planner.engine_scratch import (
    prefill_rows,
    recorded_rows,
    split_attention_bytes,
    split_attention_rows,
)
from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.ledgers import Part
from onebudget.planner.policies.settings import whole
from onebudget.units import MIB, format_bytes

if TYPE_CHECKING:
    from onebudget.planner.catalogue.gpus import GpuFacts
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.policies.versions import EngineVersion

SIZE_SETTING = "SGLANG_FLASHINFER_WORKSPACE_SIZE"
_USUAL_BYTES, _LARGE_BYTES = 384 * MIB, 512 * MIB
_LARGE_FAMILIES = ("qwen2", "qwen3", "mimo", "qwen3_vl", "qwen3_vl_moe")
"""Families whose workspace the engine enlarges by itself, Qwen2 first."""


_WITH_SINKS = ("gpt_oss",)
"""Families whose attention has sinks, which FlashInfer's kernels are not used for."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """The workspace as a part of the card, and what is wrong with it."""

    parts: tuple[Part, ...] = ()
    warnings: tuple[str, ...] = ()


def attention_scratch(
    settings: Mapping[str, Any], version: EngineVersion, dims: Dims, gpu: GpuFacts, *, ranks: int, recorded: int
) -> Scratch:
    """The workspace of FlashInfer where that is the backend, and a warning where its kernels want more than it has.

    ``ranks`` divide the heads; ``recorded`` is the largest batch of a graph, 0 without graphs.
    """
    if not _uses_flashinfer(settings, version, dims, gpu):
        return Scratch()
    nbytes = whole(settings, SIZE_SETTING, _default_bytes(version, dims)) or 0
    figure = Figure.exact(nbytes, f"FlashInfer's workspace of {format_bytes(nbytes)}", "declared")
    part = Part("fixed_workspace", "attention", figure, "load")
    return Scratch((part,), _overflow(nbytes, dims, gpu, ranks, recorded))


def _uses_flashinfer(settings: Mapping[str, Any], version: EngineVersion, dims: Dims, gpu: GpuFacts) -> bool:
    """As asked for; by itself on cards without a backend of their own, and before those backends came."""
    asked = settings.get("attention_backend")
    if asked is not None:
        return str(asked).lower() == "flashinfer"
    if dims.is_latent or dims.compressed is not None or dims.family in _WITH_SINKS or gpu.sm is None:
        return False
    has_own = (gpu.sm == 90 and version.at_least(0, 4, 6)) or (100 <= gpu.sm < 110 and version.at_least(0, 5, 3))
    return not has_own


def _default_bytes(version: EngineVersion, dims: Dims) -> int:
    family = dims.family.removesuffix("_text")
    large = version.at_least(0, 4) if family == "qwen2" else version.at_least(0, 5) and family in _LARGE_FAMILIES
    return _LARGE_BYTES if large else _USUAL_BYTES


def _overflow(nbytes: int, dims: Dims, gpu: GpuFacts, ranks: int, recorded: int) -> tuple[str, ...]:
    heads, kv_heads = max(1, dims.heads // ranks), max(1, dims.kv_heads // ranks)
    rows = recorded_rows(requests=recorded, heads_per_kv_head=max(1, heads // kv_heads))
    if gpu.sms:
        rows = max(rows, prefill_rows(multiprocessors=gpu.sms, kv_heads=kv_heads, head_dim=dims.head_dim))
    need = split_attention_bytes(heads=heads, padded_rows=rows, head_dim=dims.head_dim, with_sums=True)
    if need <= nbytes:
        return ()
    most = split_attention_rows(nbytes, heads=heads, head_dim=dims.head_dim)
    return (
        f"FlashInfer's workspace of {format_bytes(nbytes)} is too small: {heads} heads x {rows} rows x {dims.head_dim} "
        f"x 4 B need {format_bytes(need)}, and it takes {most} rows, however much of the card is free. Set "
        f"{SIZE_SETTING} to at least {need}.",
    )
