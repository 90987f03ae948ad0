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
from onebudget.core import RequestOutput, ScheduledBatch
from onebudget.engine import probe
from onebudget.engine.dry_runs import dry_profile
from onebudget.engine.ranks import close_ranks
from onebudget.errors import CapacityError, ConfigError

RANK = int(os.environ["RANK"])
PROMPTS = ["Hello there", "abc " * 20, "x", "The quick brown fox"]
DEALT = [*PROMPTS, "zz top " * 9, "a b c d e f g", "one two"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# The long prompt takes several chunks, and four requests more steps than one.
KNOBS: dict[str, Any] = {
    "dtype": "fp32", "max_seq_len": 128, "max_num_tokens": 48, "max_batch_size": 3, "tokens_per_block": 8,
}  # fmt: skip


def engine(folder: Path, *memory: str, **knobs: Any) -> LLM:
    """``memory``: of each rank."""
    return LLM(folder, device_memory=memory[RANK], strict_memory=True, offline=True, **{**KNOBS, **knobs})


def answers(llm: LLM, params: SamplingParams = GREEDY, prompts: list[str] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
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


def serve_own(folder: Path) -> dict[str, Any]:
    """Each rank has requests of its own, of every kind of model; then what only one of the models needs to show."""
    seen: dict[str, Any] = {}
    for kind in sorted(folder.iterdir()):
        with engine(kind, "12MiB", "10MiB", attention_dp=True) as llm:
            seen[kind.name] = served_own(llm)
            dry = dry_profile(kind, "float32", llm.config, ranks=2, attention_dp=True)
            seen[kind.name]["dry"] = dry.activation_bytes - dry.allocated_bytes
    with engine(kind, "12MiB", "12MiB", attention_dp=True, overlap=False, enable_sleep=True) as llm:
        seen["plain"] = served_own(llm)
        seen["interrupted"] = interrupted(llm)
        llm.sleep(level=2)
        llm.wake()
        seen["awake"] = answers(llm, prompts=DEALT)
        seen["stream"] = refused_stream(llm)
    for overlap in (True, False):
        with engine(kind, "12MiB", "12MiB", attention_dp=True, overlap=overlap, max_batch_size=1 + overlap) as llm:
            seen[f"failing, overlap {overlap}"] = failing(llm)
    return seen


def serve_demo(folder: Path) -> dict[str, Any]:
    with engine(folder, "1GiB", "1GiB", attention_dp=True) as llm:
        return served_own(llm)


def served_own(llm: LLM) -> dict[str, Any]:
    tokens = answers(llm, prompts=DEALT)
    outputs = llm.generate(["x" * 200, "abc"], GREEDY)
    return {
        "tokens": tokens,
        "refused": [output.finish_reason for output in outputs],
        "ledger": llm.budget.to_dict(),
        "counters": llm.engine.executor.counters.to_dict(),
        "throughput": llm.run_report(outputs)["throughput"],
        "held": held(llm),
    }


def held(llm: LLM) -> list[int]:
    """Blocks and slots that are not free, once nothing is kept for reuse."""
    kv, slots = llm.engine.executor.kv, llm.engine.executor.slots
    kv.reset_reuse()
    return [kv.used_blocks, kv.max_resource_count() - kv.free_blocks, slots.max_resource_count() - slots.free_slots]


def refused_stream(llm: LLM) -> str:
    try:
        next(llm.stream(DEALT))
    except ConfigError as error:
        return str(error)
    return ""


def failing(llm: LLM) -> dict[str, Any]:
    """Rank 1 finds no block in its third step, then its sampler fails in the third step of a second call."""
    executor = llm.engine.executor
    if RANK == 1:
        executor.kv.prepare = failing_once(executor.kv.prepare, short_of_blocks)  # type: ignore[method-assign]
    blocks = llm.generate(DEALT, GREEDY)
    if RANK == 1:
        executor.sampler.launch = failing_once(executor.sampler.launch, broken)  # type: ignore[method-assign]
    sampling = llm.generate(DEALT, GREEDY)
    return {"blocks": list(map(told, blocks)), "sampling": list(map(told, sampling)), "held": held(llm)}


def told(output: RequestOutput) -> dict[str, Any]:
    return {"tokens": output.token_ids, "reason": output.finish_reason, "error": output.error}


def failing_once(work: Callable[..., Any], fail: Callable[..., None]) -> Callable[..., Any]:
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            fail(*arguments)
        return work(*arguments, **named)

    return called


def short_of_blocks(batch: ScheduledBatch) -> None:
    raise CapacityError("no block", request_id=batch.requests[0].id)


def broken(*_: Any) -> None:
    raise ValueError("no number")


def fail_in_forward(folder: Path) -> dict[str, Any]:
    """Rank 1 fails inside the model, where rank 0 waits for its rows."""
    with engine(folder, "12MiB", "12MiB", attention_dp=True) as llm:
        if RANK == 1:
            llm.engine.station.model.module.model.layers[1].self_attn.register_forward_pre_hook(broken)
        llm.generate(DEALT, GREEDY)
    return {}


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
    work.__name__: work
    for work in (
        serve, serve_own, serve_demo, fail_in_forward, fail_in_profile, too_small, started_unlike,
    )
}  # fmt: skip


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
