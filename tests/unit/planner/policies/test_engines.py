"""Policies of all engines: sums, figures of real logs, and the accuracy over the cases."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.llamacpp import compute_bytes, kv_bytes
from onebudget.planner.policies.sglang import default_fraction
from onebudget.planner.policies.versions import read_version
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
    settings = {length: 8192} | ({"max_batch_size": 64} if engine == "trtllm" else {})
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
    assert len(results) >= 45
    assert sums["dense"]["median"] <= 0.015
    assert sums["other"]["median"] <= 0.03
    assert all(dataclasses.asdict(each)["true"] > 0 for each in results)
