"""Whatever the cache is made of, greedy answers are the same; and what is reused is not computed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from onebudget import LLM, SamplingParams
from onebudget.devtools.tiny_models import tiny_model

pytestmark = pytest.mark.demo

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {
    "device_memory": "1GiB", "dtype": "fp32", "max_seq_len": 256, "max_batch_size": 4, "max_num_tokens": 192,
    "tokens_per_block": 16, "kv_max_tokens": 512,
}  # fmt: skip
"""A pool so small that prefixes have to leave it."""

_BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reuse": ({"enable_block_reuse": True}, {"enable_block_reuse": False}),
    "host": ({"host_cache_bytes": 12 * _BLOCK_BYTES}, {"host_cache_bytes": 0}),
    "disk": ({"disk_cache_bytes": 40 * _BLOCK_BYTES}, {}),
    "chunks": ({"enable_chunked_prefill": True, "max_num_tokens": 64}, {"enable_chunked_prefill": False}),
    "overlap": ({"overlap": True}, {"overlap": False}),
    "manager": ({"kv_cache_manager": "v1"}, {"kv_cache_manager": "v2"}),
}
COMBINATIONS = [dict(zip(SWITCHES, each, strict=True)) for each in itertools.product((0, 1), repeat=len(SWITCHES))]
QUICK = [
    {"reuse": 0, "host": 0, "disk": 0, "chunks": 0, "overlap": 0, "manager": 0},
    {"reuse": 0, "host": 1, "disk": 0, "chunks": 1, "overlap": 0, "manager": 1},
]


def prompts() -> list[list[int]]:
    """Twelve, in three families that share long beginnings, in an order that makes room between relatives."""
    families = [list(range(1000 * family, 1000 * family + 130)) for family in (1, 2, 3)]
    return [
        families[number % 3][: 130 - 13 * (number // 3)] + [40 + 7 * number + step for step in range(1 + 5 * number)]
        for number in range(12)
    ]


def settings_of(combination: dict[str, int], tmp_path: Path) -> dict[str, Any]:
    chosen = dict(SMALL, disk_cache_dir=str(tmp_path))
    for name, side in combination.items():
        chosen |= SWITCHES[name][side]
    return chosen


@pytest.fixture(scope="module")
def wanted(demo_model: Path) -> list[list[int]]:
    """Each prompt alone in an engine that reuses nothing."""
    with LLM(demo_model, **SMALL | {"enable_block_reuse": False, "overlap": False}) as llm:
        return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts()]


def check(demo_model: Path, wanted: list[list[int]], combination: dict[str, int], tmp_path: Path) -> None:
    with LLM(demo_model, **settings_of(combination, tmp_path)) as llm:
        answers = [llm.generate(prompts(), GREEDY) for _ in range(2)]
        for outputs in answers:
            assert [output.token_ids for output in outputs] == wanted
        executor = llm.engine.executor
        counted, kv = executor.counters, executor.kv.counters
        total = 2 * sum(map(len, prompts()))
        # The first token of an answer comes with its prompt. What a pause loses is computed again.
        answered = 2 * len(wanted) * (GREEDY.max_tokens - 1)
        computed = counted.prefill_tokens + counted.decode_tokens
        assert computed == total + answered - counted.reused_tokens + counted.recomputed_tokens
        assert executor.kv.used_blocks == sum(group.set_aside_blocks for group in executor.kv.groups)
    reuses, lower = combination["reuse"] == 0, combination["host"] == 0 or combination["disk"] == 0
    assert (counted.reused_tokens > total // 4) is reuses
    if reuses:
        assert kv.evicted > 0
        assert (kv.onboarded > 0) is lower
        assert (kv.disk_written > 0) is (combination["disk"] == 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("combination", QUICK, ids=lambda one: "-".join(name for name in one if not one[name]))
def test_answers_are_the_same(
    demo_model: Path, wanted: list[list[int]], combination: dict[str, int], tmp_path: Path
) -> None:
    check(demo_model, wanted, combination, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda one: "-".join(name for name in one if not one[name]))
def test_answers_are_the_same_in_all_combinations(
    demo_model: Path, wanted: list[list[int]], combination: dict[str, int], tmp_path: Path
) -> None:
    check(demo_model, wanted, combination, tmp_path)


def test_a_disk_that_loses_blocks_costs_time_and_no_answer(
    demo_model: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    combination = {"reuse": 0, "host": 1, "disk": 0, "chunks": 0, "overlap": 0, "manager": 0}
    with LLM(demo_model, **settings_of(combination, tmp_path)) as llm:
        llm.generate(prompts(), GREEDY)
        files = sorted(tmp_path.glob("*/*.kv"))
        assert len(files) > 4
        for number, file in enumerate(files):
            if number % 2:
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:-1])
        assert [output.token_ids for output in llm.generate(prompts(), GREEDY)] == wanted
        assert llm.engine.executor.kv.counters.disk_lost > 0


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_model_of_sliding_and_full_layers_returns_its_front(tmp_path: Path, manager: str, chunked: bool) -> None:
    """One window is short, so most of a long answer's blocks leave that pool while the other keeps them."""
    folder = tiny_model("mixed", tmp_path / "model")
    settings = {"device_memory": "64MiB", "dtype": "fp32", "max_seq_len": 256, "max_batch_size": 4}
    texts = [[5 + (7 * number + step) % 250 for step in range(20 + 30 * number)] for number in range(5)]
    longer = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(folder, **settings, tokens_per_block=64) as llm:
        wanted = [llm.generate([text], longer)[0].token_ids for text in texts]
    chunks = {"max_num_tokens": 48} if chunked else {"enable_chunked_prefill": False, "max_num_tokens": 256}
    with LLM(folder, **settings, **chunks, tokens_per_block=8, kv_cache_manager=manager) as llm:
        assert [output.token_ids for output in llm.generate(texts, longer)] == wanted
        full, windowed = llm.engine.executor.kv.groups
        assert (full.window_tokens, windowed.window_tokens) == (None, 24)
        assert full.used_blocks == full.set_aside_blocks
        assert windowed.used_blocks == windowed.set_aside_blocks
        listed = {group.name: group.blocks for group in llm.budget.kv_cache.groups}
        assert listed["full"] == full.num_blocks - full.set_aside_blocks
        assert listed["window 24"] == windowed.num_blocks - windowed.set_aside_blocks
        assert windowed.peak_used_blocks < full.peak_used_blocks


def test_a_narrower_window_is_what_layers_attend_to(tmp_path: Path) -> None:
    """The model's window is 24 and the knob's 16, with blocks of any size: the same answers as of a model of 16."""
    settings = {"device_memory": "64MiB", "dtype": "fp32", "max_seq_len": 256, "max_batch_size": 2}
    texts = [[5 + (7 * number + step) % 250 for step in range(20 + 50 * number)] for number in range(3)]
    longer = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    narrow = tiny_model("sliding", tmp_path / "narrow", sliding_window=16)
    with LLM(narrow, **settings, max_num_tokens=256) as llm:
        wanted = [llm.generate([text], longer)[0].token_ids for text in texts]
    wide = tiny_model("sliding", tmp_path / "wide")
    with LLM(wide, **settings, max_num_tokens=256) as llm:
        assert [output.token_ids for output in llm.generate(texts, longer)] != wanted
    with LLM(wide, **settings, max_num_tokens=40, tokens_per_block=4, max_attention_window=[16]) as llm:
        assert [output.token_ids for output in llm.generate(texts, longer)] == wanted
        (group,) = llm.engine.executor.kv.groups
        assert (group.window_tokens, group.used_blocks) == (16, group.set_aside_blocks)
