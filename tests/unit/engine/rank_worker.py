"""One rank of a test: carries out a scenario and prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from onebudget.budget.ledger import Ledger, Term
from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams
from onebudget.devtools.scripted import ScriptedRunner
from onebudget.engine.data_parallel import attention_data_parallel
from onebudget.engine.executor import Executor
from onebudget.engine.process_ranks import ProcessRanks
from onebudget.engine.ranks import read_environment
from onebudget.errors import AgreementError, BudgetError, ModelError
from onebudget.resources import KVCacheManager
from onebudget.resources.kv.store import CountedStore

SEEN: list[Any] = []


def exchange(ranks: ProcessRanks) -> None:
    SEEN.append(ranks.gather({"rank": ranks.rank}))
    SEEN.append(ranks.minimum(10 - ranks.rank))
    SEEN.append(ranks.broadcast(f"from {ranks.rank}"))
    SEEN.append(ranks.await_work([ranks.rank]))
    SEEN.append(ranks.lead(os.getpid) == os.getpid())
    with ranks.stage("empty"):
        pass
    try:
        ranks.begin_step(lambda: ranks.rank)
    except AgreementError as drifted:
        SEEN.append(str(drifted))
    try:
        step_until_interrupted(ranks)
    except KeyboardInterrupt:
        SEEN.append("KeyboardInterrupt")


def step_until_interrupted(ranks: ProcessRanks) -> None:
    with ranks.hold_interrupts():
        for step in range(3):
            ranks.begin_step(partial(int, step))
            SEEN.append(f"step {step}")
            if ranks.rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGINT)


def raise_in_stage(ranks: ProcessRanks) -> None:
    with ranks.stage("load"):
        if ranks.rank == 1:
            with ranks.explaining():
                ledger = Ledger(capacity_bytes=9, terms=(Term("weights", "models", 9),), fits=False, shortfall_bytes=5)
                raise BudgetError("does not fit", ledger=ledger)


def raise_amid_exchange(ranks: ProcessRanks) -> None:
    with ranks.stage("profile"):
        ranks.gather(1)
        if ranks.rank == 1:
            raise ValueError("no such shape")
        ranks.gather(2)
        ranks.gather(3)


def all_fail_alike(ranks: ProcessRanks) -> None:
    with ranks.stage("load"):
        raise ModelError("no config.json")


def die(ranks: ProcessRanks) -> None:
    with ranks.stage("profile"):
        ranks.meet()
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def leave_without_a_word(ranks: ProcessRanks) -> None:
    with ranks.stage("profile"):
        ranks.meet()
        if ranks.rank == 0:
            os._exit(0)


def hang(ranks: ProcessRanks) -> None:
    with ranks.stage("profile"):
        if ranks.rank == 1:
            signal.pause()


def serve_own_requests(ranks: ProcessRanks) -> None:
    """Rank 0 has three requests, rank 1 has one that comes late; both compute in every step or none does."""
    config = BudgetConfig(max_seq_len=64, max_num_tokens=16, tokens_per_block=4)
    kv = KVCacheManager(CountedStore(16, 4))
    runner = ScriptedRunner(lambda one: 7)
    agreement = attention_data_parallel(ranks, kv)
    engine = Executor(config, cast("Any", runner), kv, agreement=agreement)
    requests = [Request(number, [5] * 6, SamplingParams(), max_new_tokens=3) for number in range(3 - 2 * ranks.rank)]
    for step in range(14):
        if step == 4 * ranks.rank:
            for one in requests:
                engine.submit(one)
        engine.step()
    SEEN.append([[one.finish_reason, len(one.output_token_ids)] for one in requests])
    SEEN.append(len(runner.steps))
    SEEN.append(kv.free_blocks)


SCENARIOS: dict[str, Callable[[ProcessRanks], None]] = {
    work.__name__: work
    for work in (
        exchange, raise_in_stage, raise_amid_exchange, all_fail_alike, die, leave_without_a_word, hang,
        serve_own_requests,
    )
}  # fmt: skip


def main(scenario: str, timeout_seconds: str) -> int:
    place = read_environment(os.environ)
    assert place is not None
    ranks = ProcessRanks(*place, device="host", timeout_seconds=int(timeout_seconds))
    error: BaseException | None = None
    try:
        SCENARIOS[scenario](ranks)
    except BaseException as raised:
        error = raised
    ranks.close()
    ledger = getattr(error, "ledger", None)
    print(
        json.dumps(
            {
                "seen": SEEN,
                "error": None if error is None else type(error).__name__,
                "message": str(error),
                "ledger": None if ledger is None else ledger.to_dict(),
                "speaks": ranks.speaks,
            }
        )
    )
    return 0 if error is None else 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
