"""``plan`` for the host device says what ``run`` then does, to the token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import onebudget
from onebudget import LLM
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind, tiny_model

MEMORY = "2GiB"


def same(folder: Path, memory: str, knobs: dict[str, Any]) -> None:
    planned = onebudget.plan(folder, "host", gpu_total=memory, **knobs)
    with LLM(folder, device_memory=memory, **knobs) as llm:
        budget = llm.budget
    assert planned.kv_cache == budget.kv_cache
    assert {term.name: term.bytes for term in planned.terms} == {term.name: term.bytes for term in budget.terms}
    assert planned.caps == budget.caps
    assert planned.admission == budget.admission


LARGE_STEPS: list[dict[str, Any]] = [
    {},
    {"max_seq_len": 1024, "max_batch_size": 4},
    {"enable_cuda_graphs": False, "enable_penalties": False, "free_gpu_memory_fraction": 0.5},
    {"skip_estimation": True},
]
SMALL_STEPS: list[dict[str, Any]] = [
    {"max_seq_len": 512, "max_num_tokens": 128, "max_batch_size": 2},
    {"dtype": "fp32", "max_num_tokens": 100, "tokens_per_block": 5, "max_batch_size": 3, "max_seq_len": 300},
    {"kv_max_tokens": 4000, "enable_chunked_prefill": False, "max_num_tokens": 64, "max_batch_size": 1},
]


@pytest.mark.demo
@pytest.mark.parametrize("knobs", [*SMALL_STEPS, *(pytest.param(each, marks=pytest.mark.long) for each in LARGE_STEPS)])
def test_the_demo_model(
    demo_model: Path, knobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path))
    same(demo_model, MEMORY, knobs)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_models_of_every_kind(kind: TinyKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path / "cache"))
    folder = tiny_model(kind, tmp_path / kind, num_hidden_layers=2)
    same(folder, "96MiB", {"max_seq_len": 256, "max_num_tokens": 512, "dtype": "fp32"})
