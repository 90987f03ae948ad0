"""Pools that exchange blocks while an engine serves: the answers are those of pools that keep their size."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, SamplingParams
from onebudget.config import BudgetConfig
from onebudget.device import open_device
from onebudget.devtools.tiny_models import TinyKind
from onebudget.engine.build import build_engine
from onebudget.engine.executor import Executor
from onebudget.progress import SilentProgress
from onebudget.resources.kv import rebalance
from onebudget.resources.kv.elastic import ElasticPool

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
KNOBS: dict[str, Any] = {
    "dtype": "fp32", "device_memory": "8MiB", "max_seq_len": 96, "max_batch_size": 4, "max_num_tokens": 32,
    "tokens_per_block": 8, "kv_cache_manager": "v2", "max_gpu_total_bytes": "384KiB", "host_cache_bytes": 0,
}  # fmt: skip
RATIO = (0.6, 0.4)
"""The window of 24 tokens gets more than half; prompts that are longer use the other pool more."""


def load() -> list[list[int]]:
    numbers = random.Random(4)
    return [[numbers.randrange(4, 260) for _ in range(numbers.choice([3, 20, 70, 80]))] for _ in range(24)]


def watch(executor: Executor) -> list[int]:
    """Bytes of all pools whenever one changed its size."""
    seen: list[int] = []
    for group in executor.kv.groups:
        resize = group.store.resize

        def noted(blocks: int, resize: Callable[[int], None] = resize) -> None:
            resize(blocks)
            seen.append(executor.kv.allocated_bytes)

        group.store.resize = noted  # type: ignore[method-assign]
    return seen


@pytest.fixture(scope="module")
def wanted(tiny: Callable[[TinyKind], Path]) -> list[list[int]]:
    """Answers of an engine whose pools keep their size."""
    with LLM(tiny("mixed"), **KNOBS, pool_ratio=RATIO) as llm:
        assert llm.engine.executor.rebalancer is None
        assert not any(isinstance(pool, ElasticPool) for pool in llm.engine.executor.kv.pools)
        return [output.token_ids for output in llm.generate(load(), GREEDY)]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps tell enough, and pools never rest."""
    monkeypatch.setattr(rebalance, "MIN_SAMPLES", 20)
    monkeypatch.setattr(rebalance, "COOLDOWN_SECONDS", 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "settings",
    [{"pool_ratio": RATIO}, {"pool_ratio": RATIO, "overlap": False}, {"enable_sleep": True, "avg_seq_len": 90}],
)
def test_answers_are_the_same(
    tiny: Callable[[TinyKind], Path], wanted: list[list[int]], settings: dict[str, Any]
) -> None:
    with LLM(tiny("mixed"), **KNOBS, **settings, kv_pool_rebalance=True) as llm:
        executor, device = llm.engine.executor, llm.engine.station.device
        assert executor.rebalancer is not None
        quota, seen = executor.kv.allocated_bytes, watch(executor)
        assert quota <= llm.budget.kv_cache.bytes + llm.budget.term("graphs").bytes
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(load(), GREEDY)] == wanted
            if "enable_sleep" in settings:
                llm.sleep()
                assert "kv_cache" not in device.used_by_owner()
                llm.wake()
            assert device.used_by_owner()["kv_cache"] == executor.kv.allocated_bytes
        assert (executor.rebalancer.moves > 0, executor.rebalancer.failed) == (True, 0)
        assert max(seen) <= quota
        assert all(group.free_blocks + group.set_aside_blocks == group.num_blocks for group in executor.kv.groups)


@pytest.mark.usefixtures("eager")
def test_a_fault_while_growing_ends_no_request(tiny: Callable[[TinyKind], Path], wanted: list[list[int]]) -> None:
    with LLM(tiny("mixed"), **KNOBS, pool_ratio=RATIO, kv_pool_rebalance=True) as llm:
        executor = llm.engine.executor
        assert executor.rebalancer is not None
        with llm.engine.station.device.faults.armed("map", skip=1):
            assert [output.token_ids for output in llm.generate(load(), GREEDY)] == wanted
        assert executor.rebalancer.failed == 1
        assert (executor.counters.failed_steps, executor.stopped) == (0, None)


@pytest.mark.parametrize(
    ("kind", "device", "says"),
    [
        ("gqa", {}, "there is one pool"),
        ("mixed", {"vmm_supported": False}, "no virtual memory"),
        ("mixed", {"granularity_bytes": 2**17}, "have no room"),
    ],
)
def test_where_pools_keep_their_size_it_is_said_once(
    tiny: Callable[[TinyKind], Path],
    caplog: pytest.LogCaptureFixture,
    kind: TinyKind,
    device: dict[str, Any],
    says: str,
) -> None:
    ratio = RATIO if kind == "mixed" else None
    config = BudgetConfig(**KNOBS, pool_ratio=ratio, kv_pool_rebalance=True)
    opened = open_device("host", capacity_bytes=16 * 2**20, **device)
    with caplog.at_level(logging.WARNING):
        engine = build_engine(tiny(kind), config, opened, SilentProgress(), strict_memory=False)
    try:
        (warning,) = [record.message for record in caplog.records if "kv_pool_rebalance" in record.message]
        assert says in warning
        assert engine.executor.rebalancer is None
    finally:
        engine.close()
