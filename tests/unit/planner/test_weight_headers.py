"""Stored tensors divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onebudget.models.files import TensorEntry
from onebudget.planner.catalogue.models import find_model
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.formats import FORMATS
from onebudget.planner.policies.weight_headers import weights_in_headers
from onebudget.planner.policies.weight_rules import Shard, rope_bytes, weights_on_rank


def stored(dims: Dims) -> Iterator[TensorEntry]:
    """The tensors a checkpoint of a plain gated model has."""

    def entry(name: str, *shape: int) -> TensorEntry:
        count = 1
        for length in shape:
            count *= length
        return TensorEntry(name, "BF16", shape, 2 * count)

    yield entry("model.embed_tokens.weight", dims.vocab, dims.hidden)
    yield entry("model.norm.weight", dims.hidden)
    if not dims.tied:
        yield entry("lm_head.weight", dims.vocab, dims.hidden)
    for layer in range(len(dims.layers)):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield entry(f"{at}{norm}.weight", dims.hidden)
        yield entry(f"{at}self_attn.q_proj.weight", dims.heads * dims.head_dim, dims.hidden)
        yield entry(f"{at}self_attn.o_proj.weight", dims.hidden, dims.heads * dims.head_dim)
        for part in "kv":
            yield entry(f"{at}self_attn.{part}_proj.weight", dims.kv_heads * dims.head_dim, dims.hidden)
        for part in ("gate", "up", "down"):
            yield entry(f"{at}mlp.{part}_proj.weight", dims.intermediate, dims.hidden)


@pytest.fixture(scope="module")
def llama() -> Dims:
    found = find_model("meta-llama/Llama-3.1-8B")
    assert found is not None
    return dims_from_config(found[1], found[0])


def test_a_whole_checkpoint_is_its_published_size(llama: Dims) -> None:
    assert weights_in_headers(stored(llama), llama, Shard()).bytes == 16_060_522_496 + rope_bytes(llama)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_headers_and_rules_agree(llama: Dims, tp: int) -> None:
    shard = Shard(tp=tp, experts_over=tp)
    by_rule = weights_on_rank(llama, FORMATS["bf16"], shard).bytes
    assert weights_in_headers(stored(llama), llama, shard).bytes == pytest.approx(by_rule, rel=1e-5)


def test_kv_heads_are_repeated_where_there_are_more_ranks(llama: Dims) -> None:
    eight = weights_in_headers(stored(llama), llama, Shard(tp=8)).bytes
    sixteen = weights_in_headers(stored(llama), llama, Shard(tp=16)).bytes
    kv = 2 * llama.kv_heads * llama.head_dim * llama.hidden * 2 * len(llama.layers)
    norms = (2 * len(llama.layers) + 1) * llama.hidden * 2
    assert eight - rope_bytes(llama) == (16_060_522_496 - norms) // 8 + norms
    assert 2 * sixteen - eight == rope_bytes(llama) + norms + kv // 8


def test_stages_of_a_pipeline_hold_everything_once(llama: Dims) -> None:
    half = len(llama.layers) // 2
    first = weights_in_headers(stored(llama), llama, Shard(end_layer=half, has_head=False)).bytes
    last = weights_in_headers(stored(llama), llama, Shard(first_layer=half, has_embedding=False)).bytes
    assert first + last == 16_060_522_496 + 2 * rope_bytes(llama)
