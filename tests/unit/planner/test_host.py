"""Host memory of plans: sizes per rank times ranks and managers, what pinning makes of them, hosts that are too small,
and cards whose memory is the machine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError
from onebudget.planner.host import CARD_SHARE, TOTAL, ranks_per_host
from onebudget.planner.host_memory import pinned_bytes
from onebudget.planner.plan import answer, plan, replan
from onebudget.planner.question import Question, make_question
from onebudget.units import GIB, MIB

GB = 10**9
LLAMA, HYBRID = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct"
BLOCK = 16 * 131072
"""Bytes of a block of Llama-3.1-8B over all layers on one rank."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path))


def question(engine: str, gpu: str = "H100-SXM-80GB", model: str = LLAMA, **asked: Any) -> Question:
    return make_question(model, gpu, revision=None, offline=True, engine=engine, quick=True, **asked)


def lines(ledger: Ledger) -> dict[str, int]:
    return {line.name: line.bytes for line in ledger.host}


def total(ledger: Ledger) -> int:
    return sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes


# -- tiers of engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("swap", "layer_bytes"), [(4, 128 * MIB), (5, 256 * MIB), (8.5, 512 * MIB)])
def test_swapped_blocks_are_pinned_layer_by_layer(swap: float, layer_bytes: int) -> None:
    ledger = question("vllm", engine_version="0.6.6", settings={"swap_space": swap}).ledger()
    asked = int(swap * GIB) // BLOCK * BLOCK // 32
    assert pinned_bytes(asked) == layer_bytes
    host = answer(question("vllm", engine_version="0.6.6", settings={"swap_space": swap})).host
    assert {line.name: line.bytes for line in host}["kv_swap"] == 32 * layer_bytes
    assert ledger.host == ()


def test_the_first_core_swaps_by_default_and_the_second_never() -> None:
    assert lines(answer(question("vllm", engine_version="0.6.6")))["kv_swap"] == 4 * GIB
    newer = answer(question("vllm", engine_version="0.20.2", settings={"swap_space": 64}))
    assert "kv_swap" not in lines(newer)
    assert any("swap_space belongs to the first core" in note for note in newer.notes)


def test_every_cache_manager_of_a_rank_takes_the_host_cache() -> None:
    tier = 192 * GIB
    draft = {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model_dir": "meta-llama/Llama-3.2-1B"}
    drafting = {"host_cache_size": tier, "speculative_config": draft}
    ledger = answer(question("trtllm", "H100-SXM-80GBx8", settings=drafting), host_memory_bytes=2 * 2**40)
    assert {lines(ledger)[name] for name in ("host_kv_tier", "draft_host_kv_tier")} == {tier}
    assert not ledger.fits
    assert ledger.shortfall_bytes == 2 * 8 * tier - 2 * 2**40 == 2**40
    plain = answer(question("trtllm", "H100-SXM-80GBx8", settings={"host_cache_size": tier}))
    assert "draft_host_kv_tier" not in lines(plain)


def test_sglang_keeps_evicted_pages_by_ratio_or_by_size() -> None:
    on = {"enable_hierarchical_cache": True}
    ledger = answer(question("sglang", settings=on))
    assert lines(ledger)["host_kv_tier"] - 2 * ledger.kv_cache.bytes in range(131072)
    sized = answer(question("sglang", settings={**on, "hicache_size": 20, "hicache_ratio": 3}))
    assert lines(sized)["host_kv_tier"] - 20 * GB in range(131072)
    off = answer(question("sglang", settings={"hicache_size": 20}))
    assert "host_kv_tier" not in lines(off)
    assert any("without enable_hierarchical_cache" in note for note in off.notes)


def test_sglang_gives_states_a_tier_as_large_as_that_of_the_cache() -> None:
    asked = question("sglang", "H200-141GBx8", HYBRID, settings={"enable_hierarchical_cache": True, "hicache_size": 20})
    ledger = answer(asked, host_memory_bytes=320 * GB)
    host = lines(ledger)
    assert host["host_state_tier"] == 20 * GB
    kept = host["host_kv_tier"] + host["host_state_tier"]
    assert kept >= 40 * GB
    assert not ledger.fits
    assert ledger.shortfall_bytes == 8 * kept - (320 * GB - 10 * GIB)
    assert any("hicache_size counts twice" in note for note in ledger.notes)


def test_our_engine_shares_its_host_cache_out_among_the_ranks() -> None:
    ledger = answer(question("onebudget", "H100-SXM-80GBx4", settings={"host_cache_bytes": 64 * GIB}))
    host = lines(ledger)
    assert host["host_kv_tier"] == 16 * GIB
    assert host[TOTAL] == 4 * (host["load_staging"] + 16 * GIB)


def test_the_v2_manager_takes_half_a_known_host_but_no_more_than_its_pool() -> None:
    asked = question("onebudget", settings={"kv_cache_manager": "v2"})
    assert "host_kv_tier" not in lines(answer(asked))
    assert lines(answer(asked, host_memory_bytes=64 * GIB))["host_kv_tier"] == 32 * GIB
    large = answer(asked, host_memory_bytes=2**40)
    assert lines(large)["host_kv_tier"] == large.kv_cache.bytes
    none = question("onebudget", settings={"kv_cache_manager": "v2", "host_cache_bytes": 0})
    assert "host_kv_tier" not in lines(answer(none, host_memory_bytes=64 * GIB))


@pytest.mark.parametrize("value", ["much", -1, True])
def test_a_size_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="hicache_size"):
        answer(question("sglang", settings={"hicache_size": value}))


# -- hosts that are too small -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier_gb", "fits"), [(200, False), (100, True)])
def test_a_size_meant_for_the_machine_counts_once_per_rank(tier_gb: int, fits: bool) -> None:
    asked = question("trtllm", "H100-SXM-80GBx4", settings={"host_cache_size": tier_gb * GB})
    ledger = answer(asked, host_memory_bytes=768 * GB)
    assert ledger.fits is fits
    assert ledger.shortfall_bytes == max(0, 4 * tier_gb * GB - 768 * GB)
    assert total(ledger) == ledger.capacity_bytes
    if fits:
        return
    assert ledger.kv_cache.bytes == ledger.kv_cache.tokens == ledger.kv_cache.blocks == 0
    assert any("4 ranks take" in warning and "at most 178.81 GiB each" in warning for warning in ledger.warnings)
    assert {"host_cache_size": tier_gb * GB // 2} in [change.set for change in ledger.changes]
    hosted = answer(asked.with_settings(**ledger.changes[0].set), host_memory_bytes=768 * GB)
    assert hosted.fits


def test_what_loading_alone_exceeds_is_a_warning() -> None:
    ledger = answer(question("vllm"), host_memory_bytes=8 * GIB)
    assert ledger.fits
    assert any("as long as weights are loaded" in warning for warning in ledger.warnings)


def test_a_host_of_more_cards_holds_eight() -> None:
    request = question("vllm", "H100-SXM-80GBx16", tp=8, pp=2).request()
    assert ranks_per_host(request) == 8


def test_a_plan_remembers_its_host() -> None:
    settings = {"host_cache_size": 64 * GIB}
    first = plan(LLAMA, "H100-SXM-80GBx2", engine="trtllm", host_memory="100GiB", settings=settings, offline=True)
    assert not first.fits
    assert first.request is not None and first.request["host_memory_bytes"] == 100 * GIB
    again = plan(LLAMA, "H100-SXM-80GBx2", engine="trtllm", host_memory="200GiB", settings=settings, offline=True)
    assert again.fits


# -- unified memory -----------------------------------------------------------------------------------------------

SPARK = "GB10-128GB"


@pytest.mark.parametrize("engine", ["onebudget", "sglang", "trtllm", "llamacpp"])
@pytest.mark.parametrize(("free", "host"), [(52 * GIB, None), (None, 56 * GIB), (60 * GIB, 56 * GIB)])
def test_an_engine_has_no_more_than_the_system_can_give(engine: str, free: int | None, host: int | None) -> None:
    ledger = answer(question(engine, SPARK, free_bytes=free), host_memory_bytes=host)
    assert any("the system can give" in note and "Unified memory" in note for note in ledger.notes)
    taken = sum(
        term.bytes for term in ledger.terms if term.name not in ("fraction_slack", "other_processes", "context")
    )
    assert taken + ledger.kv_cache.bytes <= 52 * GIB
    assert not any("Unified memory" in note for note in answer(question(engine)).notes)


def test_a_card_of_unified_memory_and_its_tiers_share_the_machine() -> None:
    on = {"enable_hierarchical_cache": True}
    fitting = answer(question("sglang", SPARK, settings={**on, "mem_fraction_static": 0.5, "hicache_ratio": 0.5}))
    assert fitting.fits
    share = lines(fitting)[CARD_SHARE]
    used = sum(term.bytes for term in fitting.terms if term.name != "fraction_slack") + fitting.kv_cache.bytes
    assert share == used
    twice = answer(question("sglang", SPARK, settings={**on, "mem_fraction_static": 0.5}))
    assert not twice.fits
    assert twice.changes


def test_the_whole_memory_of_a_machine_less_what_it_needs_bounds_an_engine_too() -> None:
    refused = answer(question("vllm", SPARK), host_memory_bytes=56 * GIB)
    assert not refused.fits
    assert any("refuses to start: 52.00 GiB are free" in warning for warning in refused.warnings)
    assert answer(question("vllm", SPARK, settings={"gpu_memory_utilization": 0.4}), host_memory_bytes=56 * GIB).fits


def test_cards_of_unified_memory_are_machines_of_their_own() -> None:
    assert ranks_per_host(question("vllm", f"{SPARK}x2").request()) == 1


def test_a_share_that_is_not_free_is_lowered_to_what_is() -> None:
    asked = question("vllm", SPARK, free_bytes=52 * GIB)
    ledger = answer(asked)
    assert not ledger.fits
    assert any("Unified memory: the system can give 52.00 GiB" in note for note in ledger.notes)
    lowered = [change.set["gpu_memory_utilization"] for change in ledger.changes if len(change.set) == 1
               and "gpu_memory_utilization" in change.set]  # fmt: skip
    assert lowered == [52 * GIB * 100 // ledger.capacity_bytes / 100]
    assert replan(asked, {"gpu_memory_utilization": lowered[0]}).fits
