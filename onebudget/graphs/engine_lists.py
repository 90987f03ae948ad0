"""Batch sizes that other engines capture by default, as their start-up code lists them. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from onebudget.errors import ConfigError
from onebudget.graphs.buckets import default_graph_batch_sizes

VLLM_NEWEST = (0, 32)


def trtllm_graph_batch_sizes(max_batch_size: int, *, step: str = "+64") -> list[int]:
    """TensorRT-LLM with padding: 1, 2, 4, every 8th to 128, then every 64th, or doubling."""
    return default_graph_batch_sizes(max_batch_size, step=step)


def vllm_graph_batch_sizes(
    max_num_seqs: int,
    *,
    version: tuple[int, ...] = VLLM_NEWEST,
    speculative_tokens: int = 0,
    max_num_batched_tokens: int | None = None,
    sm_100: bool = False,
) -> list[int]:
    """vLLM, by version: 1, 2, 4, then every 8th; from 0.11.2 on only every 16th from 256 on.

    The first core (below 0.8) ends at ``max_num_seqs`` rounded up to 8; 0.8 to 0.10.1 always at 512; later ones at
    twice ``max_num_seqs`` (times the tokens of a request, from 0.11.2 on), at most 512, or 1024 from 0.28 on where
    ``sm_100``. Nothing exceeds ``max_num_batched_tokens``. From 0.28 on ``max_num_seqs`` itself is captured too, and
    with speculation every multiple of a request's tokens up to it. Sizes count tokens, so that all of it serves mixed
    batches too.
    """
    if max_num_seqs < 1:
        raise ConfigError.for_field("max_num_seqs", max_num_seqs, "at least 1")
    largest = _vllm_largest(max_num_seqs, version, 1 + speculative_tokens, sm_100=sm_100)
    coarse_from = 256 if version >= (0, 11, 2) else largest + 1
    sizes = {1, 2, 4, *range(8, min(largest + 1, coarse_from), 8), *range(coarse_from, largest + 1, 16)}
    if version >= (0, 28):
        per_request = 1 + speculative_tokens
        sizes |= {
            max_num_seqs,
            *(range(per_request, max_num_seqs * per_request + 1, per_request) if speculative_tokens else ()),
        }
    limit = largest if max_num_batched_tokens is None else min(largest, max_num_batched_tokens)
    return sorted(size for size in sizes if size <= limit)


def _vllm_largest(max_num_seqs: int, version: tuple[int, ...], per_request: int, *, sm_100: bool) -> int:
    if version < (0, 8):
        return -(-max_num_seqs // 8) * 8
    if version < (0, 10, 2):
        return 512
    most = 1024 if sm_100 and version >= (0, 28) else 512
    return min(2 * max_num_seqs * (per_request if version >= (0, 11, 2) else 1), most)


def sglang_graph_batch_sizes(max_batch_size: int) -> list[int]:
    """SGLang without speculation: 1, 2, 4, 8, 12, every 8th to 256, every 16th below 512, every 32nd from there on."""
    if max_batch_size < 1:
        raise ConfigError.for_field("max_batch_size", max_batch_size, "at least 1")
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_batch_size + 1, 32))
    return [size for size in sizes if size <= max_batch_size]


def default_lists(max_batch_size: int) -> Mapping[str, list[int]]:
    """What each engine replays for decode where no step has more than ``max_batch_size`` requests."""
    vllm = vllm_graph_batch_sizes(max_batch_size)
    return {
        "TensorRT-LLM +64": trtllm_graph_batch_sizes(max_batch_size),
        "TensorRT-LLM x2": trtllm_graph_batch_sizes(max_batch_size, step="x2"),
        "vLLM": [size for size in vllm if size <= max_batch_size],
        "SGLang": sglang_graph_batch_sizes(max_batch_size),
    }
