"""What vLLM sets when the user does not: batch limits, capture sizes, worker and runner, by version and card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onebudget.planner.policies.dims import Dims
from onebudget.planner.policies.settings import switch, whole
from onebudget.planner.policies.versions import EngineVersion
from onebudget.units import GIB

_LARGE_CARD = 70 * GIB
_HUGE_CARD = 160 * GIB
_LONG = 32768
_V2_FAMILIES = ("qwen3", "llama", "mistral", "deepseek_v2", "qwen2_moe", "granitemoe")
_V2_EXPERTS = ("deepseek_v2", "qwen2_moe", "granitemoe", "inkling", "longcat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``worker``: engine core V0 or V1. ``v2_runner``: the newer model runner. ``captures``: piecewise and full graphs
    recorded; ``largest_capture`` in tokens. ``tokens_given`` False: the tokens of a step are the version's default."""

    worker: str
    v2_runner: bool
    max_len: int
    batch_tokens: int
    batch_requests: int
    captures: int
    largest_capture: int
    prefix_caching: bool
    tokens_given: bool


def find_limits(
    settings: dict[str, Any],
    dims: Dims,
    version: EngineVersion,
    total_bytes: int,
    gpu: str,
    use: str,
    draft: int,
    *,
    quantised: bool,
    sm: int | None,
) -> Limits:
    """Settings as given, and the version's own where nothing was. ``quantised``: weights of fewer than 16 bits;
    ``sm``: the card's compute capability, as in 90."""
    worker = find_worker(version)
    requests = (
        whole(settings, "max_num_seqs") or _recorded(settings, worker) or _requests(version, worker, total_bytes, gpu)
    )
    max_len = whole(settings, "max_model_len") or dims.max_len or 4096
    chunked = switch(
        settings,
        "enable_chunked_prefill",
        default=worker == "V1" or (version.at_least(0, 5, 3) and _v0_chunks(dims, max_len, settings)),
    )
    tokens = whole(settings, "max_num_batched_tokens")
    if tokens is None:
        tokens = _tokens(version, worker, total_bytes, gpu, use, chunked=chunked, max_len=max_len)
        tokens = min(tokens, requests * max_len) if worker == "V1" else tokens
    ceiling = 1024 if version.at_least(0, 28) and sm is not None and sm // 10 == 10 else 512
    captures, largest = _captures(settings, version, worker, requests, tokens, draft, ceiling)
    caching = switch(settings, "enable_prefix_caching", default=worker == "V1" and _caches(dims, version))
    return Limits(
        worker=worker, v2_runner=_has_v2_runner(version, dims, quantised=quantised), max_len=max_len,
        batch_tokens=tokens, batch_requests=requests, captures=captures, largest_capture=largest,
        prefix_caching=caching, tokens_given=bool(whole(settings, "max_num_batched_tokens")),
    )  # fmt: skip


def find_worker(version: EngineVersion) -> str:
    if version.worker in ("V0", "V1"):
        return version.worker
    return "V1" if version.at_least(0, 8) else "V0"


def _v0_chunks(dims: Dims, max_len: int, settings: dict[str, Any]) -> bool:
    """The first core splits long prompts by itself only where prompts may be very long."""
    quantised = str(settings.get("kv_cache_dtype", "auto")) not in ("auto", "None")
    return max_len > _LONG and not dims.multimodal and not quantised


def _recorded(settings: dict[str, Any], worker: str) -> int:
    """The first core records graphs up to the requests of a step, so a list tells them."""
    sizes = settings.get("cudagraph_capture_sizes")
    return int(max(sizes)) if worker == "V0" and isinstance(sizes, (list, tuple)) and sizes else 0


def _requests(version: EngineVersion, worker: str, total_bytes: int, gpu: str) -> int:
    if worker == "V0":
        return 256
    return 1024 if _is_large(version, total_bytes, gpu) else 256


def _is_large(version: EngineVersion, total_bytes: int, gpu: str) -> bool:
    """Cards of 70 GiB and more; an A100 counts as small from 0.9 on."""
    if "a100" in gpu.lower() and version.at_least(0, 9):
        return False
    return total_bytes >= _LARGE_CARD


def _tokens(
    version: EngineVersion, worker: str, total_bytes: int, gpu: str, use: str, *, chunked: bool, max_len: int
) -> int:
    if worker == "V0":
        if not chunked:
            return max(max_len, 2048)
        return 2048 if version.at_least(0, 6, 5) else 512
    if version.at_least(0, 28) and total_bytes >= _HUGE_CARD:
        tokens = 16384
    elif _is_large(version, total_bytes, gpu):
        tokens = 16384 if use == "offline" else 8192
    else:
        tokens = 8192 if use == "offline" else 2048
    return tokens if chunked else max(tokens, max_len)


def _captures(
    settings: dict[str, Any],
    version: EngineVersion,
    worker: str,
    requests: int,
    tokens: int,
    draft: int,
    ceiling: int,
) -> tuple[int, int]:
    """Graphs recorded over all modes, and the largest of them in tokens; by default none above ``ceiling``."""
    if switch(settings, "enforce_eager", default=False):
        return 0, 0
    sizes = settings.get("cudagraph_capture_sizes")
    piecewise = str(settings.get("cudagraph_mode", "")).upper() == "PIECEWISE"
    both = worker == "V1" and version.at_least(0, 11) and not piecewise
    if isinstance(sizes, (list, tuple)) and sizes:
        decode = sum(1 for size in sizes if size <= requests * (1 + draft))
        return len(sizes) + (decode if both else 0), max(sizes)
    if worker == "V0":
        return 3 + requests // 8, requests
    largest = whole(settings, "max_cudagraph_capture_size") or _largest_capture(version, requests, draft, ceiling)
    chosen = [size for size in _steps(version, largest) if size <= tokens]
    decode = sum(1 for size in chosen if size <= requests * (1 + draft))
    return len(chosen) + (decode if both else 0), max(chosen, default=0)


def _largest_capture(version: EngineVersion, requests: int, draft: int, ceiling: int) -> int:
    if not version.at_least(0, 10, 2):
        return ceiling
    return min(2 * requests * (1 + draft if version.at_least(0, 11, 2) else 1), ceiling)


def _steps(version: EngineVersion, largest: int) -> list[int]:
    fine = [1, 2, 4, *range(8, min(largest, 255) + 1, 8)]
    rest = range(256, largest + 1, 16 if version.at_least(0, 11, 2) else 8)
    return [size for size in (*fine, *rest) if size <= largest]


def _caches(dims: Dims, version: EngineVersion) -> bool:
    return version.at_least(0, 28) if dims.is_hybrid else True


def _has_v2_runner(version: EngineVersion, dims: Dims, *, quantised: bool) -> bool:
    """Whether the newer runner is the default, as read in the sources of 0.22.1 to 0.31.0."""
    if version.worker == "V2" or version.at_least(0, 31):
        return True
    if version.at_least(0, 28) and dims.family == "deepseek_v4":
        return True
    if not version.at_least(0, 22) or dims.is_hybrid:
        return False
    if version.at_least(0, 25):
        return not dims.experts or dims.family.startswith(_V2_EXPERTS)
    if version.at_least(0, 24):
        return not dims.multimodal and dims.family in _V2_FAMILIES
    return dims.family == "qwen3" and not quantised
