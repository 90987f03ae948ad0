"""What the attention kernels of TensorRT-LLM take from the context phase, as declarations: plans for that engine need
them.

The context phase of multi-head latent attention (MLA) expands or gathers cached latents into a buffer that grows with
the attended tokens. Each answer restates the predicate under which the kernel allocates, or is an upper bound: too
small runs out of memory inside a forward, too large is lost to the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

FP8_CONTEXT_ARCHITECTURES = frozenset({90, 100, 103, 107, 120})
"""Compute capabilities (major * 10 + minor) whose dense MLA context kernels read FP8 and stage K and V in it."""
SPARSE_CONTEXT_ARCHITECTURES = frozenset({100, 103, 107})
"""Those that run the sparse algorithms in the context phase without expanding anything."""
SPARSE_ALGORITHMS = frozenset({"dsa", "deepseek_v4"})
NVFP4_AUXILIARY_BYTES = 64
"""Per attended token beside the latent: three int32 arrays, scan scratch and padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """The facts that decide which kernel runs. Head sizes are those of MLA and stay 0 for other models.

    ``short_sequence_threshold``: context lengths up to which a sparse model takes the dense path; 0 turns that path
    off.
    """

    mla: bool
    sm: int
    kv_dtype: str = "bf16"
    heads: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    sparse_algorithm: str | None = None
    short_sequence_threshold: int = 0
    tp_size: int = 1
    attention_dp: bool = False


def workspace_bytes_per_token(facts: KernelFacts) -> int:
    """Bytes of context workspace per attended token; 0 when the kernel stages nothing.

    Sparse attention over NVFP4 pages gathers one FP8 byte per latent element. Dense FP8 attention expands the latent
    into one byte per element of K (without and with position) and V of every local head.
    """
    if not facts.mla:
        return 0
    if _gathers_nvfp4(facts):
        return facts.kv_lora_rank + facts.qk_rope_head_dim + NVFP4_AUXILIARY_BYTES
    if not _is_fp8(facts) or facts.sm not in FP8_CONTEXT_ARCHITECTURES or _never_dense(facts):
        return 0
    heads = facts.heads // (1 if facts.attention_dp else facts.tp_size)
    return heads * (facts.qk_nope_head_dim + facts.qk_rope_head_dim + facts.v_head_dim)


def workspace_is_chunk_bounded(facts: KernelFacts) -> bool:
    """Whether chunked prefill bounds the buffer: the dense kernel loops over chunks of KV, the NVFP4 gather does
    not."""
    return not (facts.mla and _gathers_nvfp4(facts))


def workspace_fixed_bytes(
    facts: KernelFacts, *, max_batch_size: int, max_num_tokens: int, max_seq_len: int, enable_cuda_graph: bool
) -> int:
    """Bytes that exist whatever the load: none of these kernels keeps a fixed arena beyond what a profile sees."""
    return 0


def _gathers_nvfp4(facts: KernelFacts) -> bool:
    return facts.kv_dtype == "nvfp4" and facts.sparse_algorithm == "dsa" and facts.sm >= 100


def _is_fp8(facts: KernelFacts) -> bool:
    return facts.kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")


def _never_dense(facts: KernelFacts) -> bool:
    """True only if no layer can take the dense path. A sparse configuration alone is not enough: layers share the
    buffer, and one dense layer needs all of it."""
    return (
        facts.sparse_algorithm in SPARSE_ALGORITHMS
        and facts.sm in SPARSE_CONTEXT_ARCHITECTURES
        and facts.short_sequence_threshold == 0
    )
