"""SGLang's attention workspace: a term of its size, and a warning where heads times rows exceed it."""

from __future__ import annotations

from typing import Any

import pytest

from onebudget.budget.ledger import Ledger
from onebudget.planner.catalogue.gpus import GpuFacts, find_gpu
from onebudget.planner.engine_scratch import prefill_rows, recorded_rows, split_attention_bytes
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB, MIB

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip
MANY_HEADS = LLAMA | {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 64}
SIZE = "SGLANG_FLASHINFER_WORKSPACE_SIZE"


def plan(config: dict[str, Any] = LLAMA, gpu: GpuFacts | str = "A100-80GB", tp: int = 1, **changes: Any) -> Ledger:
    facts = find_gpu(gpu) if isinstance(gpu, str) else gpu
    settings = {"context_length": 8192, "max_running_requests": 16} | changes.pop("settings", {})
    request = PlanRequest(
        model=ModelSource("m", config, "test"), gpu=facts, n_gpus=tp, layout=ParallelLayout(tp=tp),
        **{"engine_version": "0.5.9"} | changes, settings=settings,
    )  # fmt: skip
    return policy_for("sglang").plan(request)


def workspace(ledger: Ledger) -> int:
    """The term less the table of request slots."""
    return ledger.term("fixed_workspace").bytes - 16 * (8192 + 4) * 4


def test_the_workspace_is_a_term_of_its_size_and_takes_nothing_from_the_pool() -> None:
    flash, other = plan(), plan(settings={"attention_backend": "triton"})
    assert workspace(flash) == 384 * MIB
    assert workspace(other) == 0
    assert flash.kv_cache == other.kv_cache
    assert flash.warnings == other.warnings == ()
    assert workspace(plan(settings={SIZE: GIB})) == GIB


@pytest.mark.parametrize(
    ("family", "version", "size"),
    [("qwen2", "0.3.6", 384), ("qwen2", "0.4.9", 512), ("qwen3", "0.4.9", 384), ("qwen3", "0.5.9", 512)],
)
def test_some_families_have_a_larger_one(family: str, version: str, size: int) -> None:
    assert workspace(plan(LLAMA | {"model_type": family}, engine_version=version)) == size * MIB


@pytest.mark.parametrize(
    ("gpu", "version", "declared"),
    [
        ("A100-80GB", "0.5.9", True), ("RTX-4090-24GB", "0.5.9", True), ("H100-SXM-80GB", "0.4.1", True),
        ("H100-SXM-80GB", "0.4.9", False), ("B200-180GB", "0.5.9", False), ("MI300X", "0.5.9", False),
    ],
)  # fmt: skip
def test_cards_with_kernels_of_their_own_have_none(gpu: str, version: str, declared: bool) -> None:
    assert (workspace(plan(gpu=gpu, engine_version=version)) > 0) is declared


def test_more_heads_and_blocks_than_it_takes_are_a_warning() -> None:
    sms = find_gpu("A100-80GB").sms
    assert sms == 108
    rows = prefill_rows(multiprocessors=sms, kv_heads=1, head_dim=64)
    assert rows == 2 * 108 * 128
    need = split_attention_bytes(heads=64, padded_rows=rows, head_dim=64, with_sums=True)
    (said,) = plan(MANY_HEADS).warnings
    assert f"64 heads x {rows} rows x 64 x 4 B" in said
    assert said.endswith(f"to at least {need}.")
    assert plan(MANY_HEADS, settings={SIZE: need}).warnings == ()
    assert len(plan(MANY_HEADS, settings={SIZE: need - 1}).warnings) == 1
    assert plan(MANY_HEADS, tp=2).warnings == ()


def test_recorded_batches_count_in_tiles_of_rows() -> None:
    assert recorded_rows(requests=1023, heads_per_kv_head=8) == 16_368
    assert recorded_rows(requests=10, heads_per_kv_head=17) == 320
    gpu = GpuFacts("card", 80 * GIB, sm=80)  # the number of multiprocessors is not known
    few, many = (plan(LLAMA, gpu, settings={"cuda_graph_max_bs": size}) for size in (160, 4096))
    assert few.warnings == ()
    assert f"32 heads x {4096 * 16} rows" in many.warnings[0]
    assert plan(LLAMA, gpu, settings={"cuda_graph_max_bs": 4096, "disable_cuda_graph": True}).warnings == ()
