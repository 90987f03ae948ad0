from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget
from onebudget.budget.ledger import Admission, KVGroup, Ledger
from onebudget.budget.profile import ProfileResult
from onebudget.budget.ranks import agree_on_quotas, agreed_ledger
from onebudget.config import BudgetConfig
from onebudget.engine.agreement import agree_on_ledger, agree_on_settings
from onebudget.engine.rank_failure import LOST, RankFailure
from onebudget.engine.ranks import RankGroup, open_ranks, read_environment
from onebudget.errors import AgreementError, AllocationError, BudgetError, ConfigError, ModelError
from onebudget.models.facts import ModelFacts, facts_from_config
from onebudget.units import GIB, MIB

WORKER = Path(__file__).with_name("rank_worker.py")
FACTS = facts_from_config(
    {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 320, "model_type": "llama"}
)


# -- one process ------------------------------------------------------------------------------------------------


def test_the_place_of_a_process_is_what_torchrun_says() -> None:
    assert read_environment({}) is None
    assert read_environment({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert read_environment({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}) == (3, 4, 1)
    assert read_environment({"WORLD_SIZE": "4", "RANK": "3"}) == (3, 4, 3)


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
    ],
)
def test_an_unusable_place_is_named(environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(environ)
    assert caught.value.field == field


def test_a_process_alone_asks_nobody() -> None:
    ranks = open_ranks(environ={})
    assert (ranks.rank, ranks.size, ranks.leads, ranks.shared, ranks.speaks) == (0, 1, True, False, True)
    assert ranks.gather("a") == ["a"]
    assert ranks.minimum(3) == 3
    assert (ranks.broadcast(1), ranks.await_work(2), ranks.lead(lambda: 3)) == (1, 2, 3)
    ranks.begin_step(lambda: 5)
    with pytest.raises(ValueError, match="mine"), ranks.hold_interrupts(), ranks.stage("a"), ranks.guard("b"):
        raise ValueError("mine")
    ranks.close()


# -- what a failure says ----------------------------------------------------------------------------------------


def test_a_failure_survives_the_way_to_the_others() -> None:
    ledger = Ledger(capacity_bytes=7, terms=(), unassigned_bytes=7, fits=False, shortfall_bytes=3)
    failure = RankFailure.of(BudgetError("too small", ledger=ledger), rank=2, stage="derive")
    received = RankFailure.from_json(failure.to_json())
    assert received == failure
    error = received.error()
    assert isinstance(error, BudgetError)
    assert (str(error), error.ledger) == ("rank 2: too small", ledger)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (ConfigError("no"), ConfigError, "rank 1: no"),
        (ModelError("no"), ModelError, "rank 1: no"),
        (BudgetError("no"), BudgetError, "rank 1: no"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (OSError("no"), AgreementError, "rank 1 failed in stage 'load': OSError: no"),
        (
            AllocationError(10, 3, owner="weights"),
            AgreementError,
            "rank 1 failed in stage 'load': AllocationError: out of gpu memory for weights: 10 B requested, 3 B free.",
        ),
    ],
)
def test_the_others_raise_what_ends_them_with_the_same_status(
    raised: BaseException, expected: type[BaseException], message: str
) -> None:
    error = RankFailure.of(raised, rank=1, stage="load").error()
    assert (type(error), str(error)) == (expected, message)


def test_a_silent_rank_is_named() -> None:
    error = RankFailure(1, "profile", LOST, "it was killed.").error()
    assert isinstance(error, AgreementError)
    assert str(error) == "rank 1 stopped answering in stage 'profile': it was killed."


def test_the_same_error_elsewhere_is_recognised() -> None:
    failure = RankFailure.of(ModelError("no config"), rank=1, stage="check")
    assert failure.same_as(ModelError("no config"))
    assert not failure.same_as(ModelError("other"))
    assert not failure.same_as(ConfigError("no config"))


# -- agreement --------------------------------------------------------------------------------------------------


class Pretended(RankGroup):
    """A rank whose neighbours answer what the test says."""

    def __init__(self, rank: int, answers: list[Any]) -> None:
        self.rank, self.size, self.answers = rank, len(answers), answers

    def gather(self, value: Any) -> list[Any]:
        assert value == self.answers[self.rank]
        return self.answers


def config(**knobs: Any) -> BudgetConfig:
    return BudgetConfig(max_seq_len=1000, max_num_tokens=256, tokens_per_block=16, **knobs)


def ledger_of(total_bytes: int, slope: int, intercept: int = 0, cap: int | None = None) -> Ledger:
    profile = ProfileResult(
        model_bytes=MIB, torch_peak_bytes=2 * MIB, torch_used_bytes=MIB, device_used_bytes=MIB + 4000
    )
    ledger = derive_budget(config(), profile, CacheCost(slope, intercept), total_bytes=total_bytes)
    return ledger.replace(admission=Admission(cap))


def offer(ledger: Ledger) -> tuple[int, CacheCost, int, int | None]:
    pool = ledger.kv_cache
    cost = CacheCost(pool.bytes_per_token, pool.fixed_bytes)
    return pool.bytes, cost, ledger.capacity_bytes, ledger.admission.attended_tokens_cap


def agreed(*ledgers: Ledger) -> list[Ledger]:
    answers = [offer(ledger) for ledger in ledgers]
    return [agree_on_ledger(Pretended(rank, answers), ledger, config()) for rank, ledger in enumerate(ledgers)]


def test_cards_of_different_size_end_with_equal_tokens_and_blocks() -> None:
    before = [ledger_of(64 * MIB, 512), ledger_of(48 * MIB, 512), ledger_of(50 * MIB, 512)]
    after = agreed(*before)
    tokens = before[1].kv_cache.tokens
    # 90 % of 48 MiB less the peak (2 MiB and 4,000 B outside): 43,407,446 B, 84,780 tokens of 512 B and 86 B over
    assert (before[1].kv_cache.bytes, tokens) == (43_407_446, 84_780)
    assert {each.kv_cache.tokens for each in after} == {84_780}
    assert {each.kv_cache.blocks for each in after} == {84_780 // 16}
    assert {each.kv_cache.bytes for each in after} == {84_780 * 512}
    assert [each.limiting_rank for each in after] == [1, 1, 1]
    for mine, then in zip(after, before, strict=True):
        assert mine.unassigned_bytes == then.unassigned_bytes + then.kv_cache.bytes - 84_780 * 512
        assert mine.kv_cache.max_concurrency_at_max_seq_len == (84_780 // 16) / 63


def test_every_rank_has_the_table_of_all_ranks() -> None:
    before = [ledger_of(64 * MIB, 512), ledger_of(48 * MIB, 512)]
    first, second = agreed(*before)
    assert first.ranks == second.ranks
    assert [(line.rank, line.capacity_bytes, line.kv_bytes, line.tokens) for line in first.ranks] == [
        (0, 64 * MIB, before[0].kv_cache.bytes, before[0].kv_cache.tokens),
        (1, 48 * MIB, 43_407_446, 84_780),
    ]
    assert [line.agreed_kv_bytes for line in first.ranks] == [84_780 * 512] * 2
    alone = before[0].kv_cache.tokens
    assert f"Rank 1 limits the pool to 84780 tokens; this rank, 0, could hold {alone}." in first.notes
    assert not any("limits the pool" in note for note in second.notes)


def test_ranks_that_pay_differently_for_a_token_hold_equal_tokens_in_different_bytes() -> None:
    after = agreed(ledger_of(64 * MIB, 40_960), ledger_of(64 * MIB, 45_056, intercept=MIB))
    assert after[0].kv_cache.tokens == after[1].kv_cache.tokens
    assert after[0].kv_cache.blocks == after[1].kv_cache.blocks
    tokens = after[0].kv_cache.tokens
    assert [each.kv_cache.bytes for each in after] == [tokens * 40_960, tokens * 45_056 + MIB]
    assert after[0].limiting_rank == 1


def test_the_lowest_cap_of_attended_tokens_is_everybodys() -> None:
    after = agreed(ledger_of(64 * MIB, 512, cap=900), ledger_of(64 * MIB, 512, cap=700))
    assert [each.admission.attended_tokens_cap for each in after] == [700, 700]


def test_a_process_alone_keeps_its_ledger() -> None:
    ledger = ledger_of(64 * MIB, 512)
    assert agree_on_ledger(RankGroup(), ledger, config()) is ledger


def test_the_quota_of_the_v2_manager_keeps_room_to_resume() -> None:
    settings = config(kv_cache_manager="v2", max_util_for_resume=0.5)
    before = [ledger_of(64 * MIB, 512), ledger_of(48 * MIB, 512)]
    answers = [offer(ledger) for ledger in before]
    after = [agree_on_ledger(Pretended(rank, answers), each, settings) for rank, each in enumerate(before)]
    usable = 43_407_446 // 2 // 512
    assert [line.tokens for line in after[0].ranks][1] == usable
    assert {each.kv_cache.bytes for each in after} == {usable * 512 * 2}


def test_several_window_pools_are_refused() -> None:
    ledger = ledger_of(64 * MIB, 512)
    pool = replace(ledger.kv_cache, groups=(KVGroup("window 7", 10, 1, 512),))
    quotas = [ledger.kv_cache.bytes] * 2
    agreement = agree_on_quotas(quotas, [CacheCost(512)] * 2, Fraction(1))
    with pytest.raises(AgreementError, match="window"):
        agreed_ledger(
            ledger.replace(kv_cache=pool), agreement, rank=0, quotas=quotas, capacities=[GIB] * 2,
            blocks_per_max_request=1,
        )  # fmt: skip


def settings_of(settings: BudgetConfig, facts: ModelFacts = FACTS, dtype: str = "float32") -> dict[str, Any]:
    own = ("device_memory", "free_gpu_memory_fraction", "max_gpu_total_bytes", "kv_max_tokens")
    knobs = {name: value for name, value in settings.to_dict().items() if name not in own}
    return {**knobs, "dtype": dtype, "the model": facts}


def test_what_a_rank_has_to_offer_may_differ_and_nothing_else() -> None:
    here = config(device_memory=GIB, free_gpu_memory_fraction=0.5)
    there = config(device_memory=2 * GIB, kv_max_tokens=64, max_gpu_total_bytes=MIB)
    assert settings_of(here) == settings_of(there)
    agree_on_settings(Pretended(0, [settings_of(here), settings_of(there)]), here, FACTS, "float32")
    other = config(max_batch_size=3)
    for rank, mine in enumerate((here, other)):
        with pytest.raises(AgreementError, match="max_batch_size is 8 on rank 0, 3 on rank 1"):
            agree_on_settings(Pretended(rank, [settings_of(here), settings_of(other)]), mine, FACTS, "float32")
    with pytest.raises(AgreementError, match="dtype is float32 on rank 0, bfloat16 on rank 1"):
        agree_on_settings(
            Pretended(0, [settings_of(here), settings_of(here, dtype="bfloat16")]), here, FACTS, "float32"
        )


# -- real processes ---------------------------------------------------------------------------------------------


def processes(scenario: str, size: int, *, timeout_seconds: int = 20) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(timeout_seconds)],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]


def outcomes(scenario: str, size: int) -> list[dict[str, Any]]:
    """What each rank printed, with its exit ``status``; empty for a rank that printed nothing."""
    started = processes(scenario, size)
    printed = [process.communicate(timeout=120)[0] for process in started]
    pairs = zip(printed, started, strict=True)
    return [{**(json.loads(text) if text else {}), "status": process.returncode} for text, process in pairs]


def test_ranks_exchange_values_and_stop_together() -> None:
    for rank, seen in enumerate(each["seen"] for each in outcomes("exchange", 2)):
        assert seen[:5] == [[{"rank": 0}, {"rank": 1}], 9, "from 0", [0], rank == 0]
        assert seen[5].startswith("rank 1 stands at another point than rank 0: ")
        assert seen[6:] == ["step 0", "step 1", "KeyboardInterrupt"]  # rank 1 was interrupted in its step 1


def test_ranks_with_requests_of_their_own_compute_in_the_same_steps() -> None:
    first, second = (each["seen"] for each in outcomes("serve_own_requests", 2))
    assert (first[0], second[0]) == ([["length", 3]] * 3, [["length", 3]])
    assert first[1] == second[1]
    assert first[2] == second[2] == 16


def test_a_rank_that_raises_in_a_stage_ends_all_with_what_it_says() -> None:
    first, second = outcomes("raise_in_stage", 2)
    assert (first["status"], first["error"], first["message"]) == (3, "BudgetError", "rank 1: does not fit")
    assert (second["status"], second["error"], second["message"]) == (3, "BudgetError", "does not fit")
    assert first["ledger"] == second["ledger"]
    assert first["ledger"]["shortfall_bytes"] == 5
    assert (first["speaks"], second["speaks"]) == (True, False)


def test_ranks_that_wait_for_a_failed_one_are_woken() -> None:
    results = outcomes("raise_amid_exchange", 3)
    assert [each["status"] for each in results] == [3, 3, 3]
    assert (results[1]["error"], results[1]["message"]) == ("ValueError", "no such shape")
    for rank in (0, 2):
        told = "rank 1 failed in stage 'profile': ValueError: no such shape"
        assert (results[rank]["error"], results[rank]["message"]) == ("AgreementError", told)


@pytest.mark.long
def test_a_failure_of_all_is_nobodys_in_particular() -> None:
    assert [(each["error"], each["message"]) for each in outcomes("all_fail_alike", 2)] == [
        ("ModelError", "no config.json")
    ] * 2


def test_a_rank_that_is_killed_ends_the_others() -> None:
    first, second = outcomes("die", 2)
    assert (first["status"], second["status"]) == (3, -9)
    assert first["error"] == "AgreementError"
    assert first["message"].startswith("rank 1 stopped answering in stage 'profile': it was killed, it crashed")


def test_when_rank_0_leaves_without_a_word_another_speaks() -> None:
    first, second = outcomes("leave_without_a_word", 2)
    assert (first["status"], second["status"]) == (0, 3)
    assert second["message"].startswith("rank 0 stopped answering in stage 'profile'")
    assert second["speaks"]


def test_a_rank_that_hangs_ends_the_others_after_the_timeout() -> None:
    first, second = processes("hang", 2, timeout_seconds=2)
    result = json.loads(first.communicate(timeout=60)[0])
    second.kill()
    second.communicate()
    assert first.returncode == 3
    assert result["message"].startswith("rank 1 stopped answering in stage 'profile'")
    assert "no sign for 2 s" in result["message"]
