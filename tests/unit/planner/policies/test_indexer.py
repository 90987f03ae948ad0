"""Attention to chosen tokens: keys of the scorer, packed latents, what a profile sets aside, and the weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.catalogue.models import find_model
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.formats import FORMATS
from onebudget.planner.policies.indexer import profile_room
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import MIB

LATENT, PACKED, KEY = 2 * (512 + 64), 512 + 4 * 4 + 2 * 64, 128 + 4


def config_of(name: str) -> dict[str, Any]:
    found = find_model(name)
    assert found is not None
    return found[1]


V32 = config_of("deepseek-ai/DeepSeek-V3.2")


def bytes_per_token(engine: str, version: str, gpu: str = "H200-141GB", **changes: Any) -> int:
    config = changes.pop("config", V32)
    request = PlanRequest(
        model=ModelSource("sparse", config, "test"), gpu=find_gpu(gpu), n_gpus=8, layout=ParallelLayout(tp=8),
        engine_version=version, **changes,
    )  # fmt: skip
    return policy_for(engine).plan(request).kv_cache.bytes_per_token


@pytest.mark.parametrize(
    ("version", "gpu", "dtype", "latent"),
    [
        ("0.11.0", "H200-141GB", None, PACKED),
        ("0.13.0", "H200-141GB", None, LATENT),
        ("0.13.0", "B200-180GB", "fp8", PACKED),
        ("0.17.1", "B200-180GB", "fp8", 576),  # 16 heads on each of 8 ranks
        ("0.28.0", "H200-141GB", None, LATENT),
        ("0.28.0", "H200-141GB", "fp8", PACKED),
        ("0.28.0", "B200-180GB", "fp8", 576),
        ("0.28.0", "B200-180GB", "bf16", LATENT),
    ],
)
def test_vllm_keeps_keys_beside_latents(version: str, gpu: str, dtype: str | None, latent: int) -> None:
    assert bytes_per_token("vllm", version, gpu, kv_dtype=dtype) == 61 * (latent + KEY)


def test_layers_that_borrow_their_choice_keep_no_keys_from_0_23_on() -> None:
    config = V32 | {"index_topk_freq": 4}
    dims = dims_from_config(config)
    # Layers 0, 1, 5, 9 … score: 16 of 61.
    assert [index for index, layer in enumerate(dims.layers) if not layer.borrows_index] == [0, *range(1, 61, 4)]
    assert bytes_per_token("vllm", "0.22.1", config=config) == 61 * (LATENT + KEY)
    assert bytes_per_token("vllm", "0.24.0", config=config) == 61 * LATENT + 16 * KEY


def test_a_pattern_or_a_list_says_which_layers_score() -> None:
    glm = config_of("zai-org/GLM-5")
    pattern = dims_from_config(glm | {"index_topk_pattern": "FFS" * 26})
    types = dims_from_config(glm | {"indexer_types": ["full", "full", "shared"] * 26})
    assert sum(layer.borrows_index for layer in pattern.layers) == 26
    assert pattern.layers == types.layers


def test_room_for_the_scorer() -> None:
    shape = dims_from_config(V32).indexer
    assert shape is not None

    def kept(version: str, *, packed: bool) -> tuple[int, int]:
        room = profile_room(
            shape, length=163_840, batch_tokens=8192, heads=16, row=576, packed=packed,
            version=read_version("vllm", version),
        )  # fmt: skip
        return room.kept - 8192 * 2048 * 4, room.passing

    keys = 825 * MIB
    assert kept("0.11.0", packed=True) == (keys, 0)
    assert kept("0.15.1", packed=False) == (keys, 0)
    assert kept("0.15.1", packed=True) == (900 * MIB, 0)
    assert kept("0.28.0", packed=False) == (keys + MIB, 512 * MIB)
    assert kept("0.28.0", packed=True) == (900 * MIB + 144 * MIB, 512 * MIB)


def test_scorers_weigh_the_same_on_every_rank() -> None:
    plain = {key: value for key, value in V32.items() if not key.startswith("index_")}
    rows = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    for tp in (1, 8):
        shard = Shard(tp=tp, experts_over=tp)
        with_scorer, without = (
            weights_on_rank(dims_from_config(config), FORMATS["bf16"], shard).bytes for config in (V32, plain)
        )
        assert with_scorer - without == 61 * rows * 2


def test_partial_configs_plan() -> None:
    partial = {key: value for key, value in config_of("zai-org/GLM-5").items() if key not in _LEFT_OUT}
    shape = dims_from_config(partial).indexer
    assert shape is not None
    assert (shape.heads, shape.token_bytes) == (32, KEY)
    assert bytes_per_token("vllm", "0.28.0", config=partial) == 78 * (LATENT + KEY)


_LEFT_OUT = ("index_head_dim", "index_n_heads", "qk_rope_head_dim", "first_k_dense_replace", "max_position_embeddings")


def test_leading_dense_layers_from_a_list() -> None:
    config = {key: value for key, value in V32.items() if key != "first_k_dense_replace"}
    listed = dims_from_config(config | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58})
    assert dataclasses.replace(listed, name="") == dims_from_config(V32)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "onebudget"])
def test_every_engine_plans_them(engine: str, name: str) -> None:
    request = PlanRequest(
        model=ModelSource(name, config_of(name), "test"), gpu=find_gpu("H200-141GB"), n_gpus=16,
        layout=ParallelLayout(tp=16), weights_dtype="bf16" if engine == "onebudget" else "fp8",
        settings={"max_batch_size": 64} if engine == "trtllm" else {},
    )  # fmt: skip
    ledger = policy_for(engine).plan(request)
    layers = len(dims_from_config(request.model.config).layers)
    assert ledger.kv_cache.bytes_per_token == layers * (LATENT + KEY)
