from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from onebudget.errors import BudgetError, ConfigError
from onebudget.planner.emit import OPTIONS_FILE, emit
from onebudget.planner.flags import read_command
from onebudget.planner.policies import policy_for
from onebudget.planner.request import make_request, request_document
from onebudget.planner.source import ModelSource

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MODEL = ModelSource("an org/a 'model'", MOE, "test")
SETTINGS: dict[str, dict[str, object]] = {
    "vllm": {
        "gpu_memory_utilization": 0.85, "max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 4096,
        "kv_cache_dtype": "fp8", "block_size": 32, "enforce_eager": True, "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2, 4], "limit_mm_per_prompt": {"image": 0},
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": 1,
    },
    "sglang": {
        "mem_fraction_static": 0.8, "context_length": 8192, "max_running_requests": 64, "chunked_prefill_size": 4096,
        "kv_cache_dtype": "fp8_e4m3", "page_size": 64, "cuda_graph_bs": [1, 2, 4], "disable_radix_cache": True,
    },
    "trtllm": {
        "free_gpu_memory_fraction": 0.8, "max_tokens": 100_000, "max_seq_len": 8192, "max_num_tokens": 4096,
        "max_batch_size": 64, "kv_cache_dtype": "fp8", "tokens_per_block": 64, "kv_cache_manager": "v2",
        "backend": "pytorch",
    },
}  # fmt: skip


def planned(engine: str, settings: dict[str, object], **given: Any) -> dict[str, Any]:
    request = make_request(MODEL, "H100-SXM-80GB", engine=engine, settings=settings, **given)
    return policy_for(engine).plan(request).to_dict() | {"request": request_document(engine, request)}


@pytest.mark.parametrize("engine", list(SETTINGS))
def test_what_is_emitted_reads_back_as_the_same_plan(engine: str, tmp_path: Path) -> None:
    document = planned(engine, SETTINGS[engine], tp=2, pp=2, ep=2)
    emitted = emit(document).with_file(str(tmp_path / "extra.yaml"))
    for path, text in emitted.files.items():
        Path(path).write_text(text)
    command = read_command(emitted.text)
    assert command.engine == engine
    assert command.model == MODEL.name
    assert (command.tp, command.pp, command.ep, command.dp) == (2, 2, 2, 1)
    assert command.settings == SETTINGS[engine]
    again = make_request(MODEL, "H100-SXM-80GB", **command.arguments())
    assert policy_for(engine).plan(again).to_dict() == {k: v for k, v in document.items() if k != "request"}


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
def test_another_engines_plan_is_carried_over_as_a_pool(target: str, tmp_path: Path) -> None:
    source = "sglang" if target == "vllm" else "vllm"
    document = planned(source, SETTINGS[source], tp=2)
    emitted = emit(document, target).with_file(str(tmp_path / "extra.yaml"))
    for path, text in emitted.files.items():
        Path(path).write_text(text)
    command = read_command(emitted.text)
    length = {"vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len"}[target]
    pool = {"vllm": "kv_cache_memory_bytes", "sglang": "max_total_tokens", "trtllm": "max_tokens"}[target]
    kv = document["kv_cache"]
    assert command.settings[length] == 8192
    assert command.settings[pool] == (kv["bytes"] if target == "vllm" else kv["tokens"])
    assert command.settings["kv_cache_dtype"] == ("fp8" if target == "trtllm" else "fp8_e4m3")
    assert len(emitted.notes) == 2


def test_the_yaml_holds_the_cache_and_nothing_else() -> None:
    emitted = emit(planned("trtllm", {"max_tokens": 4096, "max_batch_size": 8}))
    assert yaml.safe_load(emitted.files[OPTIONS_FILE]) == {"kv_cache_config": {"max_tokens": 4096}}
    assert "--max_batch_size 8" in emitted.text
    assert emit(planned("trtllm", {"max_batch_size": 8})).files == {}


def test_a_bare_ledger_says_at_least_its_cap() -> None:
    document = planned("vllm", {"gpu_memory_utilization": 0.7}, tp=2)
    del document["request"]
    assert read_command(emit(document).text).settings == {"gpu_memory_utilization": 0.7}


def test_formats_that_an_option_makes_and_those_that_none_does() -> None:
    made = emit(planned("vllm", {}, weights_dtype="fp8"))
    assert read_command(made.text).weights_dtype == "fp8"
    stored = emit(planned("vllm", {}, weights_dtype="nvfp4"))
    assert stored.notes == ("The checkpoint must hold nvfp4 weights: no option makes them.",)
    wide = emit(planned("sglang", {}, weights_dtype="fp32", tp=2))
    assert read_command(wide.text).weights_dtype == "fp32"


def test_refusals() -> None:
    with pytest.raises(BudgetError, match="does not fit"):
        emit(planned("vllm", {}, weights_dtype="fp32"))
    document = planned("vllm", {})
    with pytest.raises(ConfigError, match="--for"):
        emit(document, "llamacpp")
    with pytest.raises(ConfigError, match="Did you mean vllm"):
        emit(document, "vlm")
    document["request"]["model"] = document["model"] = None
    with pytest.raises(ConfigError, match="which model"):
        emit(document)
