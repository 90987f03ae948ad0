from __future__ import annotations

from itertools import product

import pytest

from onebudget.attention.reference_rates import (
    KernelFacts,
    workspace_bytes_per_token,
    workspace_fixed_bytes,
    workspace_is_chunk_bounded,
)


def facts(**changes: object) -> KernelFacts:
    values: dict[str, object] = {
        "mla": True,
        "sm": 100,
        "kv_dtype": "fp8",
        "heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return KernelFacts(**(values | changes))  # type: ignore[arg-type]


DENSE, GATHER = 40_960, 640

# (kv dtype, algorithm, sm, short-sequence threshold) -> bytes per attended token
TABLE = [
    ("fp8", None, 80, 0, 0),
    ("fp8", None, 89, 0, 0),
    ("fp8", None, 90, 0, DENSE),
    ("fp8", None, 100, 0, DENSE),
    ("fp8", None, 103, 0, DENSE),
    ("fp8", None, 107, 0, DENSE),
    ("fp8", None, 110, 0, 0),
    ("fp8", None, 120, 0, DENSE),
    ("bf16", None, 100, 0, 0),
    ("nvfp4", None, 100, 0, 0),
    ("nvfp4", "dsa", 90, 0, 0),
    ("nvfp4", "dsa", 100, 0, GATHER),
    ("nvfp4", "dsa", 120, 0, GATHER),
    ("nvfp4", "dsa", 100, 4096, GATHER),
    ("nvfp4", "deepseek_v4", 100, 0, 0),
    ("fp8", "dsa", 90, 0, DENSE),
    ("fp8", "dsa", 100, 0, 0),
    ("fp8", "dsa", 103, 0, 0),
    ("fp8", "dsa", 107, 0, 0),
    ("fp8", "dsa", 120, 0, DENSE),
    ("fp8", "dsa", 100, 4096, DENSE),
    ("fp8", "deepseek_v4", 100, 0, 0),
    ("fp8", "deepseek_v4", 90, 0, DENSE),
    ("fp8", "deepseek_v4", 107, 1, DENSE),
    ("fp8", "other", 100, 0, DENSE),
]


@pytest.mark.parametrize(("kv_dtype", "algorithm", "sm", "threshold", "rate"), TABLE)
def test_truth_table(kv_dtype: str, algorithm: str | None, sm: int, threshold: int, rate: int) -> None:
    found = facts(kv_dtype=kv_dtype, sparse_algorithm=algorithm, sm=sm, short_sequence_threshold=threshold)
    assert workspace_bytes_per_token(found) == rate


@pytest.mark.parametrize(
    ("algorithm", "sm", "threshold"),
    list(product([None, "other", "dsa", "deepseek_v4"], [80, 89, 90, 100, 103, 107, 110, 120], [0, 1])),
)
def test_fp8_is_free_only_when_all_three_parts_hold(algorithm: str | None, sm: int, threshold: int) -> None:
    rate = workspace_bytes_per_token(facts(sparse_algorithm=algorithm, sm=sm, short_sequence_threshold=threshold))
    sparse = algorithm in ("dsa", "deepseek_v4") and sm in (100, 103, 107) and threshold == 0
    dense = sm in (90, 100, 103, 107, 120)
    assert rate == (DENSE if dense and not sparse else 0)


def test_heads_are_divided_by_tensor_parallelism_only() -> None:
    assert workspace_bytes_per_token(facts(tp_size=8)) == DENSE // 8
    assert workspace_bytes_per_token(facts(tp_size=8, attention_dp=True)) == DENSE


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_other_attention_declares_nothing(kv_dtype: str) -> None:
    found = facts(mla=False, kv_dtype=kv_dtype, sparse_algorithm="dsa")
    assert workspace_bytes_per_token(found) == 0
    assert workspace_is_chunk_bounded(found)


def test_only_the_nvfp4_gather_is_not_bounded_by_chunks() -> None:
    assert workspace_is_chunk_bounded(facts())
    assert workspace_is_chunk_bounded(facts(kv_dtype="nvfp4"))
    assert not workspace_is_chunk_bounded(facts(kv_dtype="nvfp4", sparse_algorithm="dsa"))


def test_no_fixed_arena() -> None:
    sizes = {"max_batch_size": 64, "max_num_tokens": 8192, "max_seq_len": 32_768, "enable_cuda_graph": True}
    assert workspace_fixed_bytes(facts(), **sizes) == 0  # type: ignore[arg-type]
