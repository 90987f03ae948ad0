"""The cases of ``accuracy.py``: what of a log may be read to plan, the card it names, and what the engine printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from onebudget.errors import ConfigError, ModelError
from onebudget.planner.catalogue.gpus import GpuFacts, find_gpu
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB

CASES = Path(__file__).parents[1] / "tests" / "cases"
GIVEN = (
    "engine", "version", "as_of", "gpu", "n_gpus", "tp", "pp", "dp", "ep", "model", "config", "weights_dtype",
    "kv_dtype", "settings",
)  # fmt: skip
ENGINE_ALIASES = {"aphrodite (vLLM V0 fork)": "vllm", "llama.cpp": "llamacpp"}
_NAMES = {
    "vllm": {
        "block_size": "block_size", "prefix_caching": "enable_prefix_caching",
        "chunked_prefill": "enable_chunked_prefill", "limit_mm": "limit_mm_per_prompt",
        "pp_layer_partition": "VLLM_PP_LAYER_PARTITION",
        "estimate_cudagraphs": "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    },
    "sglang": {
        "max_model_len": "context_length", "max_num_seqs": "max_running_requests", "block_size": "page_size",
        "chunked_prefill": "chunked_prefill_size",
    },
    "trtllm": {
        "max_model_len": "max_seq_len", "max_num_seqs": "max_batch_size", "block_size": "tokens_per_block",
        "max_num_batched_tokens": "max_num_tokens",
    },
    "llamacpp": {"max_model_len": "n_ctx"},
}  # fmt: skip


def load_cases(path: Path = CASES / "engine_logs.jsonl") -> list[dict[str, Any]]:
    """Cases of a file, one JSON object a line: with ``given`` and ``reported`` apart, or as collected from logs with a
    ``config_file`` beside them."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line if "given" in line else from_log(line, path.parent) for line in lines]


def from_log(log: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A collected log in two parts: what was set, under the engine's own names, and what was printed."""
    engine = ENGINE_ALIASES.get(log["engine"], log["engine"])
    config = log.get("config_file")
    given = {
        "engine": engine, "version": log.get("engine_version"), "as_of": log.get("as_of") or _as_of(log),
        "gpu": {key: value for key, value in (log.get("gpu") or {}).items() if value is not None},
        "config": str(folder / config) if config else None, "model": log.get("model"),
        "weights_dtype": log.get("weight_dtype"), "kv_dtype": log.get("kv_cache_dtype"),
        "settings": settings_of(engine, log.get("settings") or {}),
    } | {key: log.get(key) for key in ("n_gpus", "tp", "pp", "dp", "ep")}  # fmt: skip
    kept = {key: log.get(key) for key in ("id", "arch", "source")} | {"grade": str(log.get("grade") or "D")[0]}
    return {**kept, "given": given, "reported": log.get("reported") or {}, "derived": log.get("derived") or {}}


def _as_of(log: Mapping[str, Any]) -> str | None:
    """The day of a log: none is kept apart, but notes and version often name one."""
    for text in (log.get("engine_version"), log.get("notes")):
        found = re.search(r"(?<!\d)(20\d\d)-(\d\d)(?:-(\d\d))?(?!\d)", str(text or ""))
        if found and 1 <= int(found[2]) <= 12:
            return f"{found[1]}-{found[2]}-{found[3] or 15}"
    return None


def settings_of(engine: str, logged: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the engine's own names; what names no setting of it, or only repeats a default, is left out."""
    from onebudget.planner.policies import policy_for

    known = policy_for(engine).known_settings
    named = {_NAMES[engine].get(key, key): value for key, value in logged.items() if value is not None}
    for key, read in (("cudagraph_sizes", _graph_settings), ("speculative", _draft_settings), ("lora", _lora_settings)):
        if named.get(key) is not None:
            named |= read(engine, named.pop(key))
    if engine == "sglang" and named.pop("prefix_caching", None) is False:
        named["disable_radix_cache"] = True
    if str(named.get("chunked_prefill_size", "")).startswith("-"):
        named.pop("chunked_prefill_size")
    if isinstance(named.get("flash_attn"), str):
        named["flash_attn"] = str(named["flash_attn"]).endswith("on")
    return {key: value for key, value in named.items() if key in known}


def _graph_settings(engine: str, sizes: Any) -> dict[str, Any]:
    if isinstance(sizes, list):
        return {"cuda_graph_bs" if engine == "sglang" else "cudagraph_capture_sizes": sizes}
    text = str(sizes)
    count = re.fullmatch(r"(\d+) shapes", text)
    if count:
        return {"cudagraph_capture_sizes": [1, 2, 4, *range(8, (int(count[1]) - 3) * 8 + 1, 8)]}
    largest = re.search(r"(?:largest |max )(\d+)", text) or re.search(r".*\.\.(\d+)", text)
    found: dict[str, Any] = {"cudagraph_mode": "PIECEWISE"} if "PIECEWISE" in text else {}
    if largest and engine == "vllm":
        found["max_cudagraph_capture_size"] = int(largest[1])
    return found


def _draft_settings(engine: str, text: Any) -> dict[str, Any]:
    if engine == "sglang":
        return {"speculative_algorithm": "EAGLE"}
    word = re.match(r"[a-z_]+", str(text).lower())
    method = "mtp" if word is None or word[0] == "yes" else word[0]
    count = re.search(r"\b(\d+)\b", str(text))
    return {"speculative_config": {"method": method, "num_speculative_tokens": int(count[1]) if count else 1}}


def _lora_settings(engine: str, text: Any) -> dict[str, Any]:
    pairs = re.findall(r"(max_loras|max_lora_rank)=(\d+)", str(text))
    return {"enable_lora": True} | {key: int(value) for key, value in pairs} if text and engine == "vllm" else {}


def request_for(case: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> tuple[str, PlanRequest]:
    """Engine and request of a case, from its given facts alone; ``config`` in place of the case's own. Raises
    ``ConfigError`` where the card is unknown and ``ModelError`` where there is no config."""
    given = {key: case["given"].get(key) for key in GIVEN}
    engine = ENGINE_ALIASES.get(given["engine"], given["engine"])
    gpu, total = card(given["gpu"] or {})
    tp, pp, dp = given["tp"] or 1, given["pp"] or 1, given["dp"] or 1
    ep = tp * dp if given["ep"] else 1
    config = config_of(case) if config is None else config
    return engine, PlanRequest(
        model=ModelSource(str(given["model"] or ""), config, "case"),
        gpu=gpu,
        n_gpus=max(given["n_gpus"] or 1, tp * pp),
        layout=ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep),
        engine_version=given["version"],
        weights_dtype=_known_format(given["weights_dtype"]),
        kv_dtype=given["kv_dtype"],
        settings=given["settings"] or {},
        as_of=date.fromisoformat(given["as_of"]) if given["as_of"] else None,
        total_bytes=total,
        stage_total_bytes=stage_totals(given["gpu"] or {}, pp),
    )


def config_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The case's config. Raises ``ModelError`` where it has none."""
    name = case["given"].get("config")
    if not name:
        raise ModelError("the case has no config")
    found: dict[str, Any] = json.loads((CASES / "configs" / name).read_text(encoding="utf-8"))
    return found


def stage_totals(gpu: Mapping[str, Any], stages: int) -> tuple[int, ...] | None:
    """Totals of unlike cards, one for each pipeline stage, where the case names them all."""
    names = str(gpu.get("name") or "").split("+")
    facts = [_facts(name.strip()) for name in names]
    if len(names) != stages or len(names) == 1:
        return None
    return tuple(card.total_bytes for card in facts if card is not None) if None not in facts else None


def _known_format(text: str | None) -> str | None:
    return None if text in (None, "None") else text


def card(gpu: Mapping[str, Any]) -> tuple[GpuFacts, int | None]:
    """The card a case names and its total where the engine printed one; nominal sizes give way to the catalogue."""
    total, kind = gpu.get("total_gib"), gpu.get("total_kind")
    facts = _facts(str(gpu.get("name") or ""))
    printed = round(total * GIB) if total and (kind in ("printed_by_engine", "stated_usable") or not facts) else None
    if printed and kind in ("nominal", "nvidia_smi"):
        printed = printed * 983 // 1000
    if facts is None and printed is None:
        raise ConfigError(f"the card {gpu.get('name')!r} is not known")
    return facts or GpuFacts(name="custom", total_bytes=printed or 0), printed


def _facts(name: str) -> GpuFacts | None:
    """The catalogue's card: by the name, by ever fewer of its words, by its memory, or by its maker's only card."""
    plain = re.sub(r"\(.*?\)|class|\d+ MiB|\d+GiB|, .*", "", name).strip()
    tries = [name, plain, plain.split("/")[0], plain.split("+")[0], re.sub(r"^(DGX Spark|RTX 2x)\s*", "", plain)]
    words = re.split(r"[\s-]+", plain)
    tries += [" ".join(words[:count]) for count in range(len(words), 0, -1)]
    for text in tries:
        try:
            if any(sign.isdigit() for sign in text) or text.lower() == "ascend":
                return find_gpu(text.strip())
        except ConfigError:
            continue
    return _of_size(plain)


def _of_size(text: str) -> GpuFacts | None:
    size = re.search(r"(\d+)\s?GB", text)
    stand_in = {"24": "RTX-3090-24GB", "32": "RTX-5090-32GB", "16": "RTX-4080-16GB", "80": "A100-SXM-80GB"}
    if not size:
        return None
    if size[1] in stand_in:
        return find_gpu(stand_in[size[1]])
    return GpuFacts(name=f"custom {size[1]} GB", total_bytes=int(size[1]) * GIB * 983 // 1000)


def truth(case: Mapping[str, Any]) -> tuple[str, int] | None:
    """What the engine printed: tokens, else blocks, else bytes of the pool."""
    said = case["reported"]
    if said.get("full_layer_tokens"):
        return "tokens", int(said["full_layer_tokens"])
    if said.get("kv_tokens"):
        return "tokens", int(said["kv_tokens"])
    if said.get("kv_blocks"):
        return "blocks", int(said["kv_blocks"])
    for key, scale in (("kv_pool_gib", GIB), ("kv_total_mib", 2**20), ("kv_buffer_mib", 2**20)):
        value = said.get(key)
        if isinstance(value, list):
            value = sum(value)
        if value and value > 0:
            return "bytes", round(value * scale)
    if said.get("k_gib"):
        return "bytes", round((said["k_gib"] + said["v_gib"]) * GIB)
    return None
