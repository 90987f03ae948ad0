"""Groups, blocks and token lines against what engines printed, from the printed pool."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.vllm.groups import GroupPlan, cached_layers, plan_groups, printed_tokens, request_blocks
from onebudget.units import GIB

CONFIGS = Path(__file__).parents[3] / "cases" / "configs"


def groups(config: str, version: str, *, bits: int = 16, tp: int = 1, state: tuple[int, int] = (2, 2)) -> GroupPlan:
    dims = dims_from_config(json.loads((CONFIGS / config).read_text(encoding="utf-8")))
    return plan_groups(cached_layers(dims, Fraction(bits), tp, state, 0), read_version("vllm", version))


def test_a_window_model_has_seven_groups_of_ten() -> None:
    plan = groups("google__gemma-3-27b-it.json", "0.10.0")
    assert (len(plan.groups), plan.groups[0].layers, plan.padding_layers) == (7, 10, 8)
    assert printed_tokens(plan, 89_994, 1, 131_072, read_version("vllm", "0.10.0")) == 205_696


def test_a_small_window_model_has_two_padding_layers() -> None:
    plan = groups("google__gemma-3-1b-it.json", "0.13.0")
    assert (len(plan.groups), plan.groups[0].layers, plan.padding_layers) == (7, 4, 2)


def test_a_hybrid_of_the_printed_pool() -> None:
    version = read_version("vllm", "0.10.2")
    plan = groups("Qwen__Qwen3-Next-80B-A3B-Instruct.json", "0.10.2", tp=2)
    assert (plan.block_tokens, len(plan.groups), plan.groups[0].layers) == (544, 4, 12)
    blocks = 47_878_721_024 // plan.block_bytes
    assert blocks == 7162
    per_request = request_blocks(plan, 262_144, 8192, aligned_states=False, draft_tokens=0)
    assert printed_tokens(plan, blocks, per_request, 262_144, version) == 973_760
    assert round(blocks / per_request, 2) == 14.77


def test_states_in_32_bits_raise_the_block_to_2096_tokens() -> None:
    plan = groups("RedHatAI__Qwen3.6-35B-A3B-NVFP4.json", "0.20.0", bits=8, state=(2, 4))
    assert plan.block_tokens == 2096


def test_the_token_line_changed_with_0_20_1() -> None:
    plan = groups("RedHatAI__Qwen3.6-35B-A3B-NVFP4.json", "0.24.0", bits=8, state=(2, 4))
    blocks = int(6.01 * GIB) // plan.block_bytes
    per_request = request_blocks(plan, 131_072, 8192, aligned_states=True, draft_tokens=0)
    assert printed_tokens(plan, blocks, per_request, 131_072, read_version("vllm", "0.24.0")) == 569_878


@pytest.mark.parametrize(("version", "most"), [("0.11.0", 12), ("0.12.0", 13)])
def test_nearly_alike_counts_make_one_group_each_from_0_12(version: str, most: int) -> None:
    config = json.loads((CONFIGS / "openai__gpt-oss-20b.json").read_text(encoding="utf-8"))
    layers = cached_layers(dims_from_config(config), Fraction(16), 1, (2, 2), 0)
    full = next(layer for layer in layers if layer.kind == "full")
    plan = plan_groups([*layers, full], read_version("vllm", version))
    assert plan.groups[0].layers == most


def test_latent_caches_are_replicated() -> None:
    one = groups("deepseek-ai__DeepSeek-R1.json", "0.9.0")
    eight = groups("deepseek-ai__DeepSeek-R1.json", "0.9.0", tp=8)
    assert one.block_bytes == eight.block_bytes == 16 * 70_272
