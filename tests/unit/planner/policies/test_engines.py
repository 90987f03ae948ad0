"""Policies of all engines: sums, figures of real logs, and the accuracy over the cases."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onebudget.models.files import TensorEntry
from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.formats import FORMATS
from onebudget.planner.policies.llamacpp import compute_bytes, kv_bytes
from onebudget.planner.policies.sglang import default_fraction
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB, MIB

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(ROOT / "bench"))  # its parts import each other by name
    spec = importlib.util.spec_from_file_location("accuracy_bench", ROOT / "bench" / "accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy_bench"] = module
    spec.loader.exec_module(module)
    return module


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def request(**changes: Any) -> PlanRequest:
    gpu = changes.pop("gpu", "H100-SXM-80GB")
    layout = ParallelLayout(tp=changes.pop("tp", 1))
    return PlanRequest(
        model=ModelSource("llama", LLAMA, "test"), gpu=find_gpu(gpu), n_gpus=layout.tp, layout=layout, **changes
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
@pytest.mark.parametrize("gpu", ["H100-SXM-80GB", "RTX-3090-24GB", "RTX-3050-6GB"])
def test_plans_sum_to_the_card(engine: str, gpu: str) -> None:
    length = {"vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len", "llamacpp": "n_ctx"}[engine]
    settings: dict[str, Any] = {length: 8192} | ({"max_batch_size": 64} if engine == "trtllm" else {})
    settings |= {"fit": False} if engine == "llamacpp" else {}
    ledger = policy_for(engine).plan(request(gpu=gpu, settings=settings))
    parts = sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes
    assert parts == ledger.capacity_bytes
    assert ledger.fits is (gpu != "RTX-3050-6GB")
    assert ledger.fits or ledger.shortfall_bytes > 0


def test_more_of_the_card_is_a_larger_pool_by_as_much() -> None:
    small = policy_for("vllm").plan(request(engine_version="0.19.0", settings={"gpu_memory_utilization": 0.8}))
    large = policy_for("vllm").plan(request(engine_version="0.19.0", settings={"gpu_memory_utilization": 0.9}))
    total = find_gpu("H100-SXM-80GB").total_bytes
    assert large.kv_cache.bytes - small.kv_cache.bytes == total * 9 // 10 - total * 8 // 10


def test_a_given_pool_is_the_pool() -> None:
    ledger = policy_for("vllm").plan(request(settings={"kv_cache_memory_bytes": 20 * GIB}))
    assert ledger.kv_cache.bytes == 20 * GIB
    assert ledger.kv_cache.blocks == 20 * GIB // (16 * 131072)


def test_v0_peak_grows_with_the_length_below_32k() -> None:
    card = {"gpu": "RTX-3090-24GB", "engine_version": "0.6.4"}
    pools = [policy_for("vllm").plan(request(**card, settings={"max_model_len": length})) for length in (20000, 29000)]
    assert pools[0].kv_cache.low_bytes > pools[1].kv_cache.low_bytes  # type: ignore[operator]


def test_sglang_fractions_by_version() -> None:
    dims = dims_from_config(LLAMA)
    old = default_fraction({}, read_version("sglang", "0.4.2"), dims, 81559, request())
    new = default_fraction({}, read_version("sglang", "0.4.9"), dims, 24564, request())
    assert (old, new) == (0.88, 0.879)
    four = default_fraction({}, read_version("sglang", "0.4.4"), dims, 81559, request(tp=4))
    assert four == 0.85


def test_sglang_attention_by_request_groups_keeps_heads_and_attention_whole() -> None:
    layouts = [(ParallelLayout(tp=4, dp=4), {"enable_dp_attention": True}), (ParallelLayout(tp=4), {})]
    plans = [
        policy_for("sglang").plan(dataclasses.replace(request(settings=settings), n_gpus=4, layout=layout))
        for layout, settings in layouts
    ]
    assert plans[0].kv_cache.bytes_per_token == 4 * plans[1].kv_cache.bytes_per_token == 131072
    weights = [next(term.bytes for term in ledger.terms if term.name == "weights") for ledger in plans]
    attention, embedding = 32 * 2 * 4096 * (4096 + 1024) * 2, 128256 * 4096 * 2
    assert weights[0] - weights[1] == (attention + embedding) * 3 // 4


def test_trtllm_rounds_up_to_blocks_and_keeps_the_smaller_cap() -> None:
    settings = {"free_gpu_memory_fraction": 0.8, "max_tokens": 860_308, "max_num_tokens": 8192, "max_batch_size": 64}
    asked = request(engine_version="1.0.0", kv_dtype="fp8", weights_dtype="fp8", settings=settings, gpu="H200-141GB")
    ledger = policy_for("trtllm").plan(asked)
    assert ledger.kv_cache.tokens == 860_320
    assert ledger.caps[0].name == "max_tokens"


def test_llamacpp_buffers() -> None:
    command_r = dims_from_config(
        {"model_type": "cohere", "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
         "num_key_value_heads": 64, "head_dim": 128, "vocab_size": 256000}
    )  # fmt: skip
    assert kv_bytes(command_r, {}, "f16", 4096) == 5120 * MIB
    assert kv_bytes(command_r, {}, "q8_0", 4096) == 2720 * MIB
    qwen = dims_from_config(
        {"model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064}
    )  # fmt: skip
    assert compute_bytes(qwen, {}, 32768, 1) == 307 * MIB
    assert compute_bytes(qwen, {"flash_attn": False}, 32768, 1) == 2664 * MIB


def test_plans_read_settings_alone(bench: ModuleType) -> None:
    cases = [case for case in bench.load_cases() if case["grade"] in "AB"]
    mixed = copy.deepcopy(cases)
    order = list(range(len(cases)))
    random.Random(7).shuffle(order)
    for case, other in zip(mixed, order, strict=True):
        case["reported"], case["derived"] = cases[other]["reported"], cases[other]["derived"]
    for case, changed in zip(cases, mixed, strict=True):
        try:
            engine, asked = bench.request_for(case)
        except ValueError:
            continue
        same_engine, same = bench.request_for(changed)
        try:
            ledger = policy_for(engine).plan(asked)
        except ValueError:
            continue
        assert policy_for(same_engine).plan(same) == ledger


def test_pools_follow_from_their_printed_parts(bench: ModuleType) -> None:
    counts, misses = bench.rebuild_misses(bench.load_cases())
    assert counts["vllm"] >= 17 and counts["sglang"] >= 5 and counts["trtllm"] >= 4
    assert all("not explained" not in miss for miss in misses)
    assert len(misses) <= 2


def test_accuracy_does_not_get_worse(bench: ModuleType) -> None:
    results = [each for each in map(bench.judge, bench.load_cases()) if each is not None and each.grade in "AB"]
    sums = bench.summaries(results)
    assert len(results) >= 51
    assert sums["dense"]["median"] <= 0.01 and sums["dense"]["p90"] <= 0.1
    assert sums["plain, even half"]["median"] <= 0.015 and sums["plain, even half"]["p90"] <= 0.08
    assert sums["plain"]["median"] <= 0.015
    assert sums["other"]["median"] <= 0.03
    assert sums["all"]["inside"] >= 0.9 and sums["all"]["width"] <= 0.15
    assert all(dataclasses.asdict(each)["true"] > 0 for each in results)


def test_only_cases_without_a_size_or_a_card_are_not_planned(bench: ModuleType) -> None:
    refused = [line.split(":")[0] for line in bench.refusals(c for c in bench.load_cases() if c["grade"] in "AB")]
    assert refused == ["c052", "c113", "c222", "c227", "c233"]


def test_collected_logs_are_read_by_the_engines_own_names(bench: ModuleType) -> None:
    cases = sys.modules["accuracy_cases"]
    logged = {"max_model_len": 4096, "max_num_seqs": 8, "block_size": 64, "prefix_caching": False, "lora": None}
    assert cases.settings_of("vllm", logged)["enable_prefix_caching"] is False
    assert cases.settings_of("sglang", logged) == {
        "context_length": 4096, "max_running_requests": 8, "page_size": 64, "disable_radix_cache": True,
    }  # fmt: skip
    assert cases.settings_of("trtllm", logged) == {"max_seq_len": 4096, "max_batch_size": 8, "tokens_per_block": 64}
    draft = cases.settings_of("vllm", {"speculative": "mtp 3", "cudagraph_sizes": "9 piecewise (largest 48)"})
    assert draft["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert draft["max_cudagraph_capture_size"] == 48
    log = {
        "id": "x1",
        "engine": "llama.cpp",
        "engine_version": "2025-03",
        "grade": "A_full_budget",
        "config_file": None,
    }
    case = cases.from_log(log, Path("."))
    assert (case["given"]["engine"], case["given"]["as_of"], case["grade"]) == ("llamacpp", "2025-03-15", "A")


def test_an_engine_built_for_2048_requests_holds_774_mib_of_activations() -> None:
    qwen = {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    asked = dataclasses.replace(
        request(gpu="RTX-3090-24GB", engine_version="0.15.0"), model=ModelSource("q", qwen, "t")
    )
    ledger = policy_for("trtllm").plan(asked)
    terms = {term.name: term.bytes for term in ledger.terms}
    assert round(terms["activations"] / MIB, 1) == 773.5
    tied = policy_for("sglang").plan(dataclasses.replace(asked, engine_version=None))
    both = next(term.bytes for term in tied.terms if term.name == "weights")
    assert terms["weights"] - both == 151936 * 896 * 2


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_headers_replace_the_rules_unless_another_format_is_asked_for(engine: str) -> None:
    stored = (TensorEntry("model.layers.0.mlp.gate_proj.weight", "BF16", (1024, 1024), 5 * GIB),)
    ruled = request(settings={})
    read = dataclasses.replace(ruled, model=dataclasses.replace(ruled.model, tensors=stored))
    asked = dataclasses.replace(read, weights_dtype="bf16")

    def weights(question: PlanRequest) -> int:
        return next(term.bytes for term in policy_for(engine).plan(question).terms if term.name == "weights")

    assert 5 * GIB <= weights(read) <= 5 * GIB + 131072 * 128 * 2
    assert weights(asked) == weights(ruled) > 13 * GIB


@pytest.mark.parametrize(("tiles", "printed_gib"), [("marlin", 65.97), ("triton", 64.38)])
def test_experts_in_mxfp4_are_padded_to_the_kernels_tiles(tiles: str, printed_gib: float) -> None:
    path = ROOT / "tests" / "cases" / "configs" / "openai__gpt-oss-120b.json"
    dims = dims_from_config(json.loads(path.read_text(encoding="utf-8")))
    weights = weights_on_rank(dims, FORMATS["mxfp4"], Shard(tiles=tiles)).bytes / GIB
    assert weights == pytest.approx(printed_gib, rel=0.003)


def test_images_that_nobody_may_send_are_not_profiled() -> None:
    path = ROOT / "tests" / "cases" / "configs" / "nvidia__Gemma-4-26B-A4B-NVFP4.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    settings = {"max_num_batched_tokens": 16384, "max_num_seqs": 2, "max_model_len": 8192}
    asked = dataclasses.replace(request(settings=settings), model=ModelSource("gemma-4", config, "test"))
    text = dataclasses.replace(asked, settings=settings | {"limit_mm_per_prompt": {"image": 0, "video": 0}})
    plans = [policy_for("vllm").plan(question) for question in (asked, text)]
    peaks = [next(term.bytes for term in ledger.terms if term.name == "activations") for ledger in plans]
    assert peaks[0] == 16384 * 9 * 6 * (4304 + 1152)
    assert peaks[1] < GIB
