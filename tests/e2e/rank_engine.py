"""One rank of an engine test: carries out a scenario and writes what it saw to ``rank<N>.json`` among the results."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onebudget import LLM, SamplingParams
from onebudget.engine import probe
from onebudget.engine.dry_runs import dry_profile
from onebudget.engine.ranks import close_ranks

RANK = int(os.environ["RANK"])
PROMPTS = ["Hello there", "abc " * 20, "x", "The quick brown fox"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# The long prompt takes several chunks, and four requests more steps than one.
KNOBS: dict[str, Any] = {
    "dtype": "fp32", "max_seq_len": 128, "max_num_tokens": 48, "max_batch_size": 3, "tokens_per_block": 8,
}  # fmt: skip


def engine(folder: Path, *memory: str, **knobs: Any) -> LLM:
    """``memory``: of each rank."""
    return LLM(folder, device_memory=memory[RANK], strict_memory=True, offline=True, **{**KNOBS, **knobs})


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


def serve(folder: Path) -> dict[str, Any]:
    """Every kind of model over two cards of different size; then what only one of the models needs to show."""
    seen: dict[str, Any] = {}
    for kind in sorted(folder.iterdir()):
        with engine(kind, "12MiB", "10MiB") as llm:
            seen[kind.name] = {"tokens": answers(llm), "ledger": llm.budget.to_dict()}
    with engine(folder / "gqa", "8MiB", "8MiB", enable_sleep=True) as llm:
        profile = dry_profile(folder / "gqa", "float32", llm.config, ranks=2)
        seen["dry"] = {"activations": profile.activation_bytes - profile.allocated_bytes}
        seen["ledger"] = llm.budget.to_dict()
        seen["random"] = answers(llm, SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True))
        seen["interrupted"] = interrupted(llm)
        llm.sleep(level=2)
        llm.wake()
        seen["awake"] = answers(llm)
    return seen


def interrupted(llm: LLM) -> list[int]:
    """Tokens of each request when only rank 1 is told to stop, in its third step."""
    executor = llm.engine.executor
    step, steps = executor.step, 0

    def counted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    executor.step = counted
    outputs = llm.generate(PROMPTS, GREEDY, return_on_interrupt=True)
    executor.step = step
    assert llm.interrupted
    return [len(output.token_ids) for output in outputs]


def fail_in_profile(folder: Path) -> dict[str, Any]:
    """Rank 1 fails in the profile, while rank 0 already waits for it inside a forward."""

    def broken(*_: Any) -> None:
        raise OSError("injected")

    if RANK == 1:
        probe.run_dummies = broken  # type: ignore[assignment]
    engine(folder, "12MiB", "12MiB")
    return {}


def too_small(folder: Path) -> dict[str, Any]:
    engine(folder, "12MiB", "300KiB")
    return {}


def started_unlike(folder: Path) -> dict[str, Any]:
    engine(folder, "12MiB", "12MiB", max_batch_size=3 + RANK)
    return {}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    work.__name__: work for work in (serve, fail_in_profile, too_small, started_unlike)
}


def main(scenario: str, folder: str, results: str) -> int:
    try:
        found = SCENARIOS[scenario](Path(folder))
    except Exception as error:
        ledger = getattr(error, "ledger", None)
        fits = None if ledger is None else ledger.fits
        found = {"error": type(error).__name__, "message": str(error), "fits": fits}
    Path(results, f"rank{RANK}.json").write_text(json.dumps(found))
    close_ranks()
    return 3 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
