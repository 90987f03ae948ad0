from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from onebudget.budget.context_workspace import ContextWorkspace
from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget
from onebudget.budget.ledger import DeviceLine, HostLine, KVGroup, Ledger
from onebudget.budget.profile import ProfileResult
from onebudget.budget.reserves import ReserveLine
from onebudget.config import BudgetConfig
from onebudget.errors import BudgetError, ConfigError
from onebudget.units import GIB, MIB

PROFILE = ProfileResult(
    model_bytes=40 * GIB,
    torch_peak_bytes=50 * GIB,
    torch_used_bytes=43 * GIB,
    device_used_bytes=49 * GIB,
    allocated_bytes=2 * GIB,
)
RESERVES = (
    ReserveLine("multimodal_encoder", 512 * MIB),
    ReserveLine("fixed_workspace", 768 * MIB),
    ReserveLine("penalty_workspace", 164_167_680),
)
COST = CacheCost(40_960)


def worked(knobs: dict[str, Any] | None = None, **options: Any) -> Ledger:
    """The worked derivation: an 80 GiB card, 40 960 B per token."""
    config = BudgetConfig(**({"max_seq_len": 4096} | (knobs or {})))
    return derive_budget(config, PROFILE, COST, options.pop("reserves", RESERVES), total_bytes=80 * GIB, **options)


@pytest.mark.parametrize(
    ("knobs", "kv_bytes", "tokens"),
    [
        ({}, 23_769_848_217, 580_318),
        ({"kv_max_tokens": 400_000}, 16_384_000_000, 400_000),
        ({"kv_max_tokens": 400_000, "max_gpu_total_bytes": 12 * GIB}, 12_884_901_888, 314_572),
    ],
)
def test_worked_derivation(knobs: dict[str, Any], kv_bytes: int, tokens: int) -> None:
    ledger = worked(knobs)
    assert ledger.kv_cache.bytes == kv_bytes
    assert ledger.kv_cache.tokens == tokens
    assert ledger.kv_cache.blocks == tokens // 32


def test_worked_ledger_line_by_line() -> None:
    ledger = worked({"kv_max_tokens": 400_000, "max_gpu_total_bytes": 12 * GIB})
    assert {term.name: term.bytes for term in ledger.terms} == {
        "weights": 42_949_672_960,
        "activations": 8_589_934_592,
        "context": 6_442_450_944,
        "multimodal_encoder": 536_870_912,
        "fixed_workspace": 805_306_368,
        "penalty_workspace": 164_167_680,
        "fraction_slack": 2_641_094_247,
    }
    assert ledger.kv_cache.bytes == 12_884_901_888
    assert ledger.kv_cache.blocks == 9_830
    assert ledger.unassigned_bytes == 10_884_946_329
    assert ledger.capacity_bytes == 85_899_345_920
    assert ledger.kv_cache.max_concurrency_at_max_seq_len == 9_830 / 128
    assert ledger.fits
    assert ledger.shortfall_bytes == 0
    assert ledger.changes == ()


def test_caps_list_every_limit_and_which_binds() -> None:
    ledger = worked({"kv_max_tokens": 400_000, "max_gpu_total_bytes": 12 * GIB})
    assert [(cap.name, cap.value, cap.limit_bytes, cap.binding) for cap in ledger.caps] == [
        ("free_gpu_memory_fraction", 0.9, 23_769_848_217, False),
        ("max_gpu_total_bytes", 12 * GIB, 12 * GIB, True),
        ("kv_max_tokens", 400_000, 16_384_000_000, False),
    ]


def test_byte_cap_shrinks_the_token_capacity_of_v1() -> None:
    tokens = worked({"max_gpu_total_bytes": 12 * GIB, "kv_cache_manager": "v1"}).kv_cache.tokens
    assert tokens == 12 * GIB // 40_960


def test_v2_gives_a_token_cap_resume_headroom() -> None:
    ledger = worked({"kv_max_tokens": 400_000, "kv_cache_manager": "v2"})
    assert ledger.kv_cache.bytes == -(-16_384_000_000 * 100 // 95)


def test_temporary_kv_is_added_back() -> None:
    twice = ProfileResult(
        model_bytes=40 * GIB,
        torch_peak_bytes=52 * GIB,
        torch_used_bytes=45 * GIB,
        device_used_bytes=51 * GIB,
        allocated_bytes=4 * GIB,
    )
    again = derive_budget(BudgetConfig(max_seq_len=4096), twice, COST, RESERVES, total_bytes=80 * GIB)
    assert again.kv_cache == worked().kv_cache
    assert again.term("activations").bytes == worked().term("activations").bytes


def test_temporary_kv_outside_the_allocator_comes_off_the_context() -> None:
    profile = ProfileResult(
        model_bytes=40 * GIB,
        torch_peak_bytes=48 * GIB,
        torch_used_bytes=41 * GIB,
        device_used_bytes=49 * GIB,
        allocated_bytes=2 * GIB,
        kv_outside_allocator=True,
    )
    ledger = derive_budget(BudgetConfig(max_seq_len=4096), profile, COST, RESERVES, total_bytes=80 * GIB)
    assert ledger.term("activations").bytes == 8 * GIB
    assert ledger.term("context").bytes == 6 * GIB
    assert ledger.kv_cache == worked().kv_cache


def test_the_fraction_applies_after_additive_and_before_subtractive_reserves() -> None:
    plain = worked(reserves=()).kv_cache.bytes
    added = worked(reserves=[ReserveLine("fixed_workspace", 10 * GIB)]).kv_cache.bytes
    cut = worked(reserves=[ReserveLine("indexer_logits", 10 * GIB, "cuts_kv")]).kv_cache.bytes
    assert plain - added == 9 * GIB
    assert plain - cut == 10 * GIB


def test_cuts_come_off_a_capped_pool_too() -> None:
    ledger = worked({"max_gpu_total_bytes": 12 * GIB}, reserves=[ReserveLine("indexer_logits", 4 * GIB, "cuts_kv")])
    assert ledger.kv_cache.bytes == 8 * GIB
    assert ledger.term("indexer_logits").bytes == 4 * GIB


def test_the_context_workspace_sees_the_budget_already_cut() -> None:
    cost, workspace = CacheCost(35_136), ContextWorkspace(40_960, 2_097_152)
    cut = ReserveLine("indexer_logits", GIB, "cuts_kv")
    config = BudgetConfig(max_seq_len=32_768, max_batch_size=64, max_num_tokens=8192, max_gpu_total_bytes=21 * GIB)
    ledger = derive_budget(config, PROFILE, cost, (cut,), total_bytes=80 * GIB, context_workspace=workspace)
    assert ledger.term("context_workspace").bytes == 11_559_205_506
    assert ledger.kv_cache.bytes == 9_915_630_974
    assert ledger.kv_cache.tokens == 282_207
    assert ledger.admission.attended_tokens_cap == 282_207
    assert ledger.warnings == ()


def test_an_admission_cap_of_a_reserve_line_reaches_the_ledger() -> None:
    line = ReserveLine("context_workspace", GIB, "cuts_kv", admission_cap_tokens=100)
    other = ReserveLine("indexer_logits", GIB, "cuts_kv", admission_cap_tokens=0)
    assert worked(reserves=(line,)).admission.attended_tokens_cap == 100
    assert worked(reserves=(line, other)).admission.attended_tokens_cap == 0
    assert worked().admission.attended_tokens_cap is None


def test_a_cap_below_the_longest_request_is_a_warning_about_memory() -> None:
    ledger = worked(reserves=[ReserveLine("context_workspace", GIB, "cuts_kv", admission_cap_tokens=4095)])
    assert len(ledger.warnings) == 1
    assert "4095 attended tokens" in ledger.warnings[0]
    assert "memory budget" in ledger.warnings[0]
    assert not worked(reserves=[ReserveLine("x", GIB, "cuts_kv", admission_cap_tokens=4096)]).warnings


def test_memory_outside_the_allocator_is_split_as_far_as_known() -> None:
    outside = {"other_processes": GIB, "communication": 2 * GIB, "graphs": 512 * MIB}
    ledger = worked(outside=outside, logits_bytes=3 * GIB)
    assert {name: ledger.term(name).bytes for name in outside} == outside
    assert ledger.term("context").bytes == 6 * GIB - sum(outside.values())
    assert (ledger.term("activations").bytes, ledger.term("logits").bytes) == (5 * GIB, 3 * GIB)
    assert ledger.device.others_bytes == GIB
    assert ledger.kv_cache == worked().kv_cache


def test_no_more_is_told_apart_than_was_measured() -> None:
    ledger = worked(outside={"other_processes": 5 * GIB, "communication": 5 * GIB}, logits_bytes=99 * GIB)
    assert ledger.term("other_processes").bytes == 5 * GIB
    assert ledger.term("communication").bytes == GIB
    assert ledger.term("context").bytes == 0
    assert ledger.term("logits").bytes == 8 * GIB


def test_reserves_of_one_name_add_up_in_one_term() -> None:
    ledger = worked(reserves=[ReserveLine("lora", 3, reason="device pages"), ReserveLine("lora", 4, reason="tables")])
    assert ledger.term("lora").bytes == 7
    assert "device pages" in ledger.term("lora").why
    assert "tables" in ledger.term("lora").why


def test_labels_reach_the_ledger() -> None:
    ledger = worked(
        model="m",
        device=DeviceLine(name="H100", kind="fake", total_bytes=80 * GIB),
        basis={"weights": "exact", "activations": "modelled"},
        ranges={"activations": (GIB, 9 * GIB)},
        host=[HostLine("host_kv_tier", 5)],
        notes=["planned"],
        groups=lambda nbytes: [KVGroup("full", nbytes, 1, 40_960)],
    )
    assert (ledger.model, ledger.device.name, ledger.notes) == ("m", "H100", ("planned",))
    assert ledger.term("weights").basis == "exact"
    activations = ledger.term("activations")
    assert (activations.basis, activations.low_bytes, activations.high_bytes) == ("modelled", GIB, 9 * GIB)
    assert ledger.kv_cache.groups[0].bytes == ledger.kv_cache.bytes
    assert ledger.host[0].name == "host_kv_tier"


def test_every_term_says_why_with_its_numbers() -> None:
    for term in worked(outside={"graphs": 5}, logits_bytes=5).terms:
        assert term.why
        assert term.owner
    assert str(50 * GIB) in worked().term("activations").why


def test_without_a_probe_fraction_and_reserves_still_apply() -> None:
    profile = ProfileResult.without_probe(model_bytes=40 * GIB, device_used_bytes=43 * GIB)
    ledger = derive_budget(BudgetConfig(max_seq_len=4096), profile, COST, RESERVES, total_bytes=80 * GIB)
    left = 37 * GIB - sum(line.bytes for line in RESERVES)
    assert ledger.kv_cache.bytes == left * 9 // 10
    assert ledger.term("activations").bytes == 0


@pytest.mark.parametrize("percent", range(1, 101))
def test_the_fraction_is_taken_as_a_decimal(percent: int) -> None:
    profile = ProfileResult.without_probe(model_bytes=0, device_used_bytes=0)
    config = BudgetConfig(max_seq_len=1, tokens_per_block=1, free_gpu_memory_fraction=percent / 100)
    ledger = derive_budget(config, profile, CacheCost(1), total_bytes=100)
    assert ledger.kv_cache.bytes == percent


def test_one_block_to_the_byte() -> None:
    profile = ProfileResult.without_probe(model_bytes=1000, device_used_bytes=1000)
    config = BudgetConfig(max_seq_len=32, free_gpu_memory_fraction=1)
    ledger = derive_budget(config, profile, CacheCost(10, 7), total_bytes=1000 + 7 + 320)
    assert (ledger.kv_cache.blocks, ledger.kv_cache.bytes, ledger.unassigned_bytes) == (1, 327, 0)
    with pytest.raises(BudgetError) as caught:
        derive_budget(config, profile, CacheCost(10, 7), total_bytes=1000 + 7 + 319)
    failed = caught.value.ledger
    assert failed is not None
    assert (failed.fits, failed.kv_cache.bytes, failed.kv_cache.tokens, failed.shortfall_bytes) == (False, 0, 0, 1)
    assert failed.unassigned_bytes == 326


def test_a_card_smaller_than_the_peak_is_charged_in_order() -> None:
    with pytest.raises(BudgetError) as caught:
        derive_budget(BudgetConfig(max_seq_len=4096), PROFILE, COST, RESERVES, total_bytes=48 * GIB)
    ledger = caught.value.ledger
    assert ledger is not None
    assert ledger.capacity_bytes == 48 * GIB == sum(term.bytes for term in ledger.terms)
    assert ledger.term("weights").bytes == 40 * GIB
    activations = ledger.term("activations")
    assert (activations.bytes, activations.high_bytes) == (2 * GIB, 8 * GIB)
    assert "activations needs 8.00 GiB and finds 2.00 GiB" in ledger.notes[0]
    assert "fixed_workspace needs 768.00 MiB and finds 0 B" in ledger.notes[0]


def test_a_pool_below_one_full_request_fits_with_a_warning() -> None:
    ledger = worked({"max_seq_len": 1_000_000, "max_gpu_total_bytes": 100 * 32 * 40_960})
    assert ledger.fits
    assert ledger.kv_cache.blocks == 100
    assert len(ledger.warnings) == 1
    assert "the longest request that fits has 3200 tokens" in ledger.warnings[0]


def test_tokens_without_cost_are_bounded_by_the_seats() -> None:
    cost = CacheCost(0, 5 * GIB)
    config = {"max_seq_len": 4096, "max_batch_size": 8}
    free = derive_budget(BudgetConfig(**config), PROFILE, cost, total_bytes=80 * GIB)
    assert (free.kv_cache.tokens, free.kv_cache.bytes) == (4096 * 8, 5 * GIB)
    staged = derive_budget(BudgetConfig(**config), PROFILE, cost, total_bytes=80 * GIB, pp_size=2)
    assert staged.kv_cache.tokens == 4096 * 8 * 2
    capped = derive_budget(BudgetConfig(**config, kv_max_tokens=5000), PROFILE, cost, total_bytes=80 * GIB)
    assert capped.kv_cache.tokens == 5000
    with pytest.raises(BudgetError):
        derive_budget(BudgetConfig(**config), PROFILE, cost, total_bytes=59 * GIB)


@pytest.mark.parametrize(
    ("cost", "total", "field"),
    [(CacheCost(-1), GIB, "cost.slope"), (CacheCost(1, -1), GIB, "cost.intercept"), (CacheCost(1), 0, "total_bytes")],
)
def test_nonsense_is_refused(cost: CacheCost, total: int, field: str) -> None:
    profile = ProfileResult.without_probe(model_bytes=0, device_used_bytes=0)
    with pytest.raises(ConfigError) as caught:
        derive_budget(BudgetConfig(), profile, cost, total_bytes=total)
    assert caught.value.field == field


def test_free_tokens_need_a_cap_of_a_block() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        derive_budget(BudgetConfig(kv_max_tokens=31), PROFILE, CacheCost(0, GIB), total_bytes=80 * GIB)


def test_importing_the_derivation_imports_no_engine() -> None:
    code = (
        "import sys, onebudget.budget.derive, onebudget.budget, onebudget.attention.reference_rates\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'cuda', 'fastapi', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
