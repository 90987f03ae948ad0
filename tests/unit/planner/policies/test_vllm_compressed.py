"""DeepSeek-V4's pool in vLLM: page sizes, blocks and requests by version, against printed concurrency."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.formats import weight_format
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.vllm.compressed import CompressedPlan, plan_compressed, reserved_bytes
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank
from onebudget.units import GIB, MIB

CONFIG = Path(__file__).parents[3] / "cases" / "configs" / "deepseek-ai__DeepSeek-V4-Flash.json"


@pytest.fixture(scope="module")
def dims() -> Dims:
    return dims_from_config(json.loads(CONFIG.read_text(encoding="utf-8")), "deepseek-ai/DeepSeek-V4-Flash")


def plan(dims: Dims, version: str, *, length: int, tokens: int = 8192, draft_layers: int = 0) -> CompressedPlan:
    assert dims.compressed is not None
    return plan_compressed(
        dims.compressed, dims.head_dim, read_version("vllm", version), length=length, batch_tokens=tokens,
        draft_layers=draft_layers,
    )  # fmt: skip


def test_layers_keep_every_4th_or_128th_token_after_two_with_windows(dims: Dims) -> None:
    assert dims.compressed is not None
    assert dims.compressed.ratios[:5] == (0, 0, 4, 128, 4)
    assert (dims.compressed.layers_of(4), dims.compressed.layers_of(128)) == (21, 20)


@pytest.mark.parametrize(
    ("version", "nbytes"),
    [("0.22.1", 1_051_776), ("0.24.0", 1_039_680), ("0.26.0", 1_039_680), ("0.27.1", 1_002_240), ("0.31.0", 1_002_240)],
)
def test_what_a_block_costs_changed_with_versions(dims: Dims, version: str, nbytes: int) -> None:
    assert plan(dims, version, length=30_000).block_bytes == nbytes


def test_concurrency_follows_from_a_printed_pool(dims: Dims) -> None:
    found = plan(dims, "0.26.0", length=121_344, draft_layers=1)
    blocks = int(7.71 * GIB) // found.block_bytes
    assert round(blocks / found.request_blocks, 2) == 1.24


def test_a_refused_start_needed_6_66_gib(dims: Dims) -> None:
    found = plan(dims, "0.22.1", length=30_000, tokens=16_384)
    assert round(found.needed_blocks * found.block_bytes / GIB, 2) == 6.66


def test_what_is_in_flight_counts_twice_from_0_26(dims: Dims) -> None:
    once, twice = (plan(dims, version, length=500_000) for version in ("0.25.1", "0.26.0"))
    assert twice.needed_blocks > once.needed_blocks
    assert twice.needed_blocks == plan(dims, "0.25.1", length=500_000, tokens=16_384).needed_blocks


def test_weights_are_of_the_published_order(dims: Dims) -> None:
    kind = weight_format(None, dims.quantization, dims.name)
    assert 155e9 < weights_on_rank(dims, kind, Shard()).bytes < 160e9


def test_the_profile_reserves_the_larger_of_context_and_keys(dims: Dims) -> None:
    assert dims.compressed is not None
    short = reserved_bytes(dims.compressed, 512, 4096, 8192)
    assert short == 512 * MIB + 4 * (1024 + 128 + 8192) * 1024
    long = reserved_bytes(dims.compressed, 512, 1_048_576, 8192)
    assert long == 512 * MIB + 10 * 1_048_576 * 132
