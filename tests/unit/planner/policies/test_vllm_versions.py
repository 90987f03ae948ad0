"""vLLM's rules that changed between versions, on models small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.vllm.case import Case, read_case
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    **DENSE, "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
}  # fmt: skip


def request(config: dict[str, Any] = DENSE, gpu: str = "H100-SXM-80GB", **changes: Any) -> PlanRequest:
    return PlanRequest(
        model=ModelSource("m", config, "test"), gpu=find_gpu(gpu), n_gpus=1, layout=ParallelLayout(), **changes
    )


def case(version: str, **changes: Any) -> Case:
    return read_case(request(engine_version=version, **changes))


def plan(asked: PlanRequest) -> Ledger:
    return policy_for("vllm").plan(asked)


@pytest.mark.parametrize(("version", "seats"), [("0.8.5", 1024), ("0.9.2", 256), ("0.28.0", 256), ("0.31.0", 256)])
def test_an_a100_counts_as_small_from_0_9_on(version: str, seats: int) -> None:
    assert case(version, gpu="A100-SXM-80GB").limits.batch_requests == seats
    assert case(version, gpu="H100-SXM-80GB").limits.batch_requests == 1024


@pytest.mark.parametrize(
    ("version", "config", "dtype", "newer"),
    [
        ("0.21.0", DENSE, None, False), ("0.22.1", DENSE, None, True), ("0.22.1", DENSE, "fp8", False),
        ("0.24.0", DENSE, "fp8", True), ("0.24.0", EXPERTS, None, True), ("0.27.1", EXPERTS, None, True),
        ("0.27.1", {**EXPERTS, "model_type": "mixtral"}, None, False),
        ("0.31.0", {**EXPERTS, "model_type": "mixtral"}, None, True),
    ],
)  # fmt: skip
def test_which_models_run_the_newer_runner(
    version: str, config: dict[str, Any], dtype: str | None, newer: bool
) -> None:
    assert case(version, config=config, weights_dtype=dtype).limits.v2_runner is newer


def test_graphs_of_1024_tokens_on_data_centre_blackwell_since_0_28() -> None:
    """1, 2, 4, then 31 steps of 8 below 256, and steps of 16 from there: 17 up to 512, 49 up to 1024."""
    assert case("0.28.0", gpu="H100-SXM-80GB").limits.largest_capture == 512
    limits = case("0.28.0", gpu="B200-180GB").limits
    assert limits.largest_capture == 1024
    assert limits.captures == 2 * (3 + 31 + 49)


def test_prefixes_of_hybrids_are_reused_by_default_from_0_28_on() -> None:
    hybrid = {
        **DENSE, "model_type": "qwen3_next", "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    reused = {version: case(version, config=hybrid).limits.prefix_caching for version in ("0.26.0", "0.27.1", "0.28.0")}
    assert reused == {"0.26.0": False, "0.27.1": False, "0.28.0": True}
    assert case("0.26.0").limits.prefix_caching


def test_expert_buffers_stood_side_by_side_before_0_8() -> None:
    """2,048 tokens of 2 experts: gate and up, their product and the output, until the first and last share a buffer."""
    asked = request(EXPERTS, gpu="L4", settings={"max_num_batched_tokens": 2048, "max_num_seqs": 1})
    before, after = (
        plan(replace(asked, engine_version=version)).term("activations").bytes for version in ("0.7.3", "0.8.5 (V0)")
    )
    assert before - after == 2048 * 2 * 2 * min(2 * 1024, 4096)


def test_cards_without_flash_attention_keep_one_hidden_row_more() -> None:
    small = {**DENSE, "num_hidden_layers": 4}
    settings = {"max_num_batched_tokens": 8192, "max_num_seqs": 1, "max_model_len": 8192}
    old, new = (
        plan(request(small, gpu, engine_version="0.8.5 (V0)", settings=settings)).term("activations").bytes
        for gpu in ("T4", "L4")
    )
    assert old - new == 8192 * 4096 * 2


def test_offloaded_weights_are_not_on_the_card() -> None:
    whole, less = (
        plan(request(engine_version="0.31.0", settings={"cpu_offload_gb": gib})).term("weights").bytes for gib in (0, 4)
    )
    assert whole - less == 4 * GIB
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        plan(request(settings={"cpu_offload_gb": "much"}))


def test_a_plan_without_version_or_date_spans_those_of_half_a_year() -> None:
    asked = request(gpu="RTX-3050-6GB", config={**DENSE, "num_hidden_layers": 4})
    open_plan = policy_for("vllm").widened(asked, plan(asked))
    newest, older = (plan(replace(asked, engine_version=v)) for v in ("0.33.0", "0.26.0"))
    assert open_plan.kv_cache.tokens == newest.kv_cache.tokens
    low, high = open_plan.kv_cache.low_tokens, open_plan.kv_cache.high_tokens
    for each in (newest, older):
        assert low is not None and high is not None
        assert low <= (each.kv_cache.low_tokens or 0) and (each.kv_cache.high_tokens or 0) <= high
    assert any("half a year" in note for note in open_plan.notes)
