"""llama.cpp's ``fit``: the context first, then layers or experts, never past the margin and never without saying so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import GpuFacts
from onebudget.planner.plan import answer
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.llamacpp_buffers import Buffers, Placement, kv_bytes
from onebudget.planner.policies.llamacpp_fit import fit
from onebudget.planner.question import make_question
from onebudget.planner.source import ModelSource, resolve_model
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB, MIB

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
TOKEN = 32 * 8 * 128 * 2 * 2
"""Bytes of a cached token."""
CONTEXT = GIB * 45 // 100


def request(total_gib: int, config: dict[str, Any] | None = None, cards: int = 1, **changes: Any) -> PlanRequest:
    gpu = GpuFacts("card", total_gib * GIB)
    return PlanRequest(
        model=ModelSource("m", config or LLAMA, "test"), gpu=gpu, n_gpus=cards, layout=ParallelLayout(), **changes
    )


def plan(total_gib: int, config: dict[str, Any] | None = None, cards: int = 1, **changes: Any) -> Ledger:
    ledger = policy_for("llamacpp").plan(request(total_gib, config, cards, **changes))
    parts = sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes
    assert parts == ledger.capacity_bytes
    return ledger


def used(ledger: Ledger) -> int:
    return sum(ledger.term(name).bytes for name in ("weights", "activations")) + ledger.kv_cache.bytes


def test_what_leaves_the_margin_is_not_changed() -> None:
    ledger = plan(40)
    assert ledger.kv_cache.tokens == 131072
    assert ledger.changes == ()
    assert not any("fit leaves" in note for note in ledger.notes)


def test_the_context_shrinks_to_what_leaves_the_margin() -> None:
    ledger = plan(24)
    length = ledger.kv_cache.tokens
    target = 24 * GIB - CONTEXT - 1024 * MIB
    assert length % 256 == 0
    assert used(ledger) <= target < used(ledger) + 256 * TOKEN
    assert [change.set for change in ledger.changes] == [{"n_ctx": length}]
    assert any(f"from 131072 to {length} tokens" in note for note in ledger.notes)
    assert ledger.caps[0].value == length


@pytest.mark.parametrize(("margin", "least"), [(0, 4096), (2048, 4096), (1024, 8192)])
def test_margin_and_shortest_context_are_settings(margin: int, least: int) -> None:
    ledger = plan(18, settings={"fit_target": margin, "fit_ctx": least})
    length = ledger.kv_cache.tokens
    assert length >= least
    assert used(ledger) <= 18 * GIB - CONTEXT - margin * MIB


def test_a_context_below_the_shortest_is_left_alone_and_layers_move() -> None:
    ledger = plan(12)
    assert ledger.kv_cache.tokens == 4096
    change = ledger.changes[0].set
    layers = change["n_gpu_layers"] - 1
    assert change["n_ctx"] == 4096
    assert 0 < layers < 32
    assert ledger.kv_cache.bytes == 4096 * TOKEN * layers // 32
    assert any(f"{32 - layers} of 32 layers stay on the host" in note for note in ledger.notes)
    host = {line.name: line.bytes for line in ledger.host}
    assert host["cpu_kv_cache"] == 4096 * TOKEN * (32 - layers) // 32
    everything = 2 * (2 * 128256 * 4096 + 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096))
    assert 0 <= host["cpu_weights"] + ledger.term("weights").bytes - everything < MIB  # the last norm


def test_one_layer_more_would_not_leave_the_margin() -> None:
    asked = request(12)
    buffers = Buffers(asked, {}, dims_from_config(LLAMA))
    free = 12 * GIB - CONTEXT
    fitted = fit(buffers, Placement(131072, 32), free)
    target = free - GIB
    assert buffers.on_cards(fitted.place) <= target
    assert buffers.on_cards(replace(fitted.place, layers=fitted.place.layers + 1)) > target


def test_a_context_that_was_set_stays_and_layers_move() -> None:
    ledger = plan(24, settings={"n_ctx": 131072})
    assert ledger.kv_cache.tokens == 131072
    assert set(ledger.changes[0].set) == {"n_gpu_layers"}


def test_layers_that_were_set_stay() -> None:
    ledger = plan(12, settings={"n_gpu_layers": 33})
    assert not ledger.fits
    assert ledger.changes == ()
    assert plan(24, settings={"n_gpu_layers": "all"}).changes[0].set.keys() == {"n_ctx"}
    with pytest.raises(ConfigError, match="n_gpu_layers"):
        plan(24, settings={"n_gpu_layers": "some"})


def test_the_changes_are_the_settings_that_give_the_same_plan() -> None:
    first = plan(12)
    again = plan(12, settings=first.changes[0].set | {"fit": False})
    assert (again.terms, again.kv_cache, again.host) == (first.terms, first.kv_cache, first.host)
    assert again.changes == ()


@pytest.mark.parametrize("version", ["2025-03", "2025-08", "2025-11"])
def test_older_tools_change_nothing(version: str) -> None:
    ledger = plan(24, engine_version=version)
    assert not ledger.fits
    assert ledger.changes == ()
    assert plan(24, engine_version=version, settings={"fit": True}).fits


def test_the_output_matrix_goes_to_the_cards_first_since_fit_and_last_before() -> None:
    head = 128256 * 4096 * 2
    old = {count: plan(24, engine_version="2025-08", settings={"n_gpu_layers": count, "n_ctx": 4096}).term("weights")
           for count in (10, 32, 33)}  # fmt: skip
    new = {count: plan(24, settings={"n_gpu_layers": count, "n_ctx": 4096}).term("weights") for count in (1, 11, 33)}
    layer = (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) * 2
    assert old[33].bytes - old[32].bytes == head
    assert old[32].bytes - old[10].bytes == 22 * layer
    assert new[1].bytes == head
    assert new[11].bytes - new[1].bytes == 10 * layer
    assert new[33].bytes == old[33].bytes


def test_experts_of_the_first_layers_stay_on_the_host_before_whole_layers_do() -> None:
    source = resolve_model("Qwen/Qwen3-30B-A3B", offline=True)
    ledger = plan(24, dict(source.config))
    moved = ledger.changes[0].set
    assert set(moved) == {"n_ctx", "n_cpu_moe"}
    expert = 128 * 3 * 2048 * 768 * 2
    buffers = Buffers(request(24, dict(source.config)), {}, dims_from_config(source.config))
    whole = buffers.weights(Placement(4096, 48)).bytes
    assert ledger.term("weights").bytes == whole - moved["n_cpu_moe"] * expert
    assert used(ledger) <= 24 * GIB - CONTEXT - GIB < used(ledger) + expert
    assert ledger.kv_cache.bytes == 4096 * 48 * 4 * 128 * 2 * 2


def test_a_shorter_context_saves_what_the_tool_prints() -> None:
    """Its documentation shows 3456 MiB less for 4096 instead of 40960 tokens of a model with 48 layers."""
    dims = dims_from_config(resolve_model("Qwen/Qwen3-30B-A3B", offline=True).config)
    assert kv_bytes(dims, {}, "f16", 40960) - kv_bytes(dims, {}, "f16", 4096) == 3456 * MIB


def test_half_of_the_layers_cache_half_of_the_cells() -> None:
    """A log of 15 of 32 layers on the card prints 30 MiB there and 34 MiB on the host."""
    mixtral = dims_from_config(
        {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000}
    )  # fmt: skip
    card = kv_bytes(mixtral, {}, "f16", 512, first_layer=32 - 15)
    assert (card, kv_bytes(mixtral, {}, "f16", 512) - card) == (30 * MIB, 34 * MIB)


def test_several_cards_leave_a_margin_each_and_room_for_half_a_layer() -> None:
    asked = request(16, cards=2)
    buffers = Buffers(asked, {}, dims_from_config(LLAMA))
    ledger = plan(16, cards=2)
    layer = buffers.weights(Placement(131072, 32)).bytes // 32
    target = 2 * (16 * GIB - GIB) - 2 * GIB * 45 // 100 - 3 * layer // 2
    assert used(ledger) <= target < used(ledger) + 512 * TOKEN


def test_answers_are_about_the_context_that_was_chosen() -> None:
    asked = make_question("meta-llama/Llama-3.1-8B", "L4", revision=None, offline=True, engine="llamacpp")
    ledger = answer(asked)
    assert ledger.answers is not None
    assert ledger.answers.max_seq_len == ledger.kv_cache.tokens == ledger.answers.largest_seq_len < 131072
    assert ledger.answers.seq_len_bound_by == "kv_cache"
    longer = answer(replace(asked, target_seq_len=131072))
    assert longer.answers is not None
    assert not longer.answers.meets_target


def test_what_stays_on_the_host_has_to_fit_there() -> None:
    asked = make_question("Qwen/Qwen3-32B", "L4", revision=None, offline=True, engine="llamacpp")
    kept = {line.name: line.bytes for line in answer(asked).host}
    small = answer(asked, host_memory_bytes=32 * GIB)
    assert not small.fits
    assert small.shortfall_bytes == sum(kept.values()) - 32 * GIB
    assert answer(asked, host_memory_bytes=64 * GIB).fits
