"""Plans against what real engines printed: every case planned from its settings alone.

    python bench/accuracy.py [--json FILE] [--grades AB] [--all] [--parts]

The error is in KV tokens where the engine printed them, else in blocks or bytes. ``--parts`` gives the plan the printed
weights, peak and other parts instead, and checks that the pool follows. Only ``GIVEN`` keys of a case are read to plan.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError, ModelError, OneBudgetError
from onebudget.planner.catalogue.gpus import GpuFacts, find_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB

CASES = Path(__file__).parents[1] / "tests" / "cases"
GIVEN = (
    "engine", "version", "as_of", "gpu", "n_gpus", "tp", "pp", "dp", "ep", "model", "config", "weights_dtype",
    "kv_dtype", "settings",
)  # fmt: skip
PLAIN = ("dense", "moe", "mla_moe")
ENGINE_ALIASES = {"aphrodite (vLLM V0 fork)": "vllm"}


@dataclass(frozen=True)
class Result:
    """One case. ``error`` is relative; ``inside`` whether the truth lies in the plan's range; ``width`` its width."""

    id: str
    engine: str
    arch: str
    grade: str
    unit: str
    true: int
    planned: int
    error: float
    low: int
    high: int
    inside: bool
    width: float
    cause: str
    plain: bool
    even: bool


def load_cases(path: Path = CASES / "engine_logs.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def request_for(case: Mapping[str, Any]) -> tuple[str, PlanRequest]:
    """Engine and request of a case, from its given facts alone. Raises ``ConfigError`` where the card is unknown."""
    given = {key: case["given"].get(key) for key in GIVEN}
    engine = ENGINE_ALIASES.get(given["engine"], given["engine"])
    gpu, total = card(given["gpu"] or {}, given["n_gpus"] or 1)
    tp, pp, dp = given["tp"] or 1, given["pp"] or 1, given["dp"] or 1
    ep = tp * dp if given["ep"] else 1
    if not given["config"]:
        raise ModelError("the case has no config")
    config = json.loads((CASES / "configs" / given["config"]).read_text(encoding="utf-8"))
    return engine, PlanRequest(
        model=ModelSource(str(given["model"] or ""), config, "case"),
        gpu=gpu,
        n_gpus=max(given["n_gpus"] or 1, tp * pp),
        layout=ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep),
        engine_version=given["version"],
        weights_dtype=_known_format(given["weights_dtype"]),
        kv_dtype=given["kv_dtype"],
        settings=given["settings"] or {},
        as_of=date.fromisoformat(given["as_of"]) if given["as_of"] else None,
        total_bytes=total,
        stage_total_bytes=stage_totals(given["gpu"] or {}, pp),
    )


def stage_totals(gpu: Mapping[str, Any], stages: int) -> tuple[int, ...] | None:
    """Totals of unlike cards, one for each pipeline stage, where the case names them all."""
    names = str(gpu.get("name") or "").split("+")
    facts = [_facts(name.strip()) for name in names]
    if len(names) != stages or len(names) == 1:
        return None
    return tuple(card.total_bytes for card in facts if card is not None) if None not in facts else None


def _known_format(text: str | None) -> str | None:
    return None if text in (None, "None") else text


def card(gpu: Mapping[str, Any], count: int) -> tuple[GpuFacts, int | None]:
    """The card a case names and its total where the engine printed one; nominal sizes give way to the catalogue."""
    del count
    total, kind = gpu.get("total_gib"), gpu.get("total_kind")
    facts = _facts(str(gpu.get("name") or ""))
    printed = round(total * GIB) if total and (kind in ("printed_by_engine", "stated_usable") or not facts) else None
    if printed and kind in ("nominal", "nvidia_smi"):
        printed = printed * 983 // 1000
    if facts is None and printed is None:
        raise ConfigError(f"the card {gpu.get('name')!r} is not known")
    return facts or GpuFacts(name="custom", total_bytes=printed or 0), printed


def _facts(name: str) -> GpuFacts | None:
    plain = re.sub(r"\(.*?\)|class|\d+ MiB|\d+GiB|, .*", "", name).strip()
    tries = [name, plain, plain.split("/")[0], plain.split("+")[0], re.sub(r"^(DGX Spark|RTX 2x)\s*", "", plain)]
    words = plain.split()
    tries += [" ".join(words[:count]) for count in range(len(words), 0, -1)]
    for text in tries:
        try:
            if any(sign.isdigit() for sign in text):
                return find_gpu(text.strip())
        except ConfigError:
            continue
    size = re.match(r"(\d+)\s?GB", plain)
    stand_in = {"24": "RTX-3090-24GB", "32": "RTX-5090-32GB", "16": "RTX-4080-16GB", "80": "A100-SXM-80GB"}
    return find_gpu(stand_in[size[1]]) if size and size[1] in stand_in else None


def truth(case: Mapping[str, Any]) -> tuple[str, int] | None:
    """What the engine printed: tokens, else blocks, else bytes of the pool."""
    said = case["reported"]
    if said.get("full_layer_tokens"):
        return "tokens", int(said["full_layer_tokens"])
    if said.get("kv_tokens"):
        return "tokens", int(said["kv_tokens"])
    if said.get("kv_blocks"):
        return "blocks", int(said["kv_blocks"])
    for key, scale in (("kv_pool_gib", GIB), ("kv_total_mib", 2**20), ("kv_buffer_mib", 2**20)):
        value = said.get(key)
        if isinstance(value, list):
            value = sum(value)
        if value and value > 0:
            return "bytes", round(value * scale)
    if said.get("k_gib"):
        return "bytes", round((said["k_gib"] + said["v_gib"]) * GIB)
    return None


def planned(ledger: Ledger, unit: str) -> tuple[int, int, int]:
    """The plan's figure in that unit, and its bounds."""
    kv = ledger.kv_cache
    low_bytes, high_bytes = kv.low_bytes or 0, kv.high_bytes or 0
    if unit == "tokens":
        return kv.tokens or (kv.low_tokens or 0), kv.low_tokens or 0, kv.high_tokens or 0
    pool = kv.bytes or (low_bytes + high_bytes) // 2
    if unit == "bytes":
        return pool, low_bytes, high_bytes
    per_block = max(kv.bytes_per_token * kv.tokens_per_block, 1)
    return pool // per_block, low_bytes // per_block, high_bytes // per_block


def judge(case: Mapping[str, Any]) -> Result | None:
    """The case planned and compared; None where it can't be (no figure, no config, unknown card)."""
    said = truth(case)
    if said is None or not case["given"].get("config"):
        return None
    try:
        engine, request = request_for(case)
    except (ConfigError, ModelError):
        return None
    try:
        ledger = policy_for(engine).plan(request)
    except OneBudgetError as error:
        if isinstance(error, ModelError):
            return None  # a config of parts: nothing could be sized from it
        return _failed(case, engine, said, str(error))
    unit, true = said
    guess, low, high = planned(ledger, unit)
    arch, given = case["arch"], case["given"]
    return Result(
        id=case["id"],
        engine=engine,
        arch=arch,
        grade=case["grade"],
        unit=unit,
        true=true,
        planned=guess,
        error=guess / true - 1,
        low=low,
        high=high,
        inside=low <= true <= high,
        width=(high - low) / max(guess, 1),
        cause=cause(case, ledger),
        plain=arch in PLAIN and (given.get("pp") or 1) == 1,
        even=is_even(case["id"]),
    )


def _failed(case: Mapping[str, Any], engine: str, said: tuple[str, int], why: str) -> Result:
    return Result(
        case["id"],
        engine,
        case["arch"],
        case["grade"],
        said[0],
        said[1],
        0,
        -1.0,
        0,
        0,
        False,
        0.0,
        why,
        case["arch"] in PLAIN,
        is_even(case["id"]),
    )


def cause(case: Mapping[str, Any], ledger: Ledger) -> str:
    """The printed part furthest from the plan's, in GiB."""
    said = case["reported"]
    pairs = {
        "weights": ("weights_gib", ("weights",)),
        "activations": ("activation_peak_gib", ("activations",)),
        "outside torch": ("non_torch_gib", ("communication",)),
        "graphs": ("graph_estimate_gib", ("graphs",)),
    }
    gaps = {
        name: sum(ledger.term(term).bytes for term in terms) / GIB - said[key]
        for name, (key, terms) in pairs.items()
        if isinstance(said.get(key), (int, float))
    }
    if said.get("non_torch_gib") is not None and (case["given"].get("tp") or 1) == 1:
        gaps.pop("outside torch", None)
    if not gaps:
        return "not printed"
    name = max(gaps, key=lambda each: abs(gaps[each]))
    return f"{name} {gaps[name]:+.2f} GiB"


def is_even(case_id: str) -> bool:
    """Constants are chosen on these cases only."""
    return int(hashlib.sha256(case_id.encode()).hexdigest(), 16) % 2 == 0


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Median, 90th percentile and worst of the absolute errors, and how the ranges did."""
    chosen = list(results)
    if not chosen:
        return {"cases": 0}
    errors = sorted(abs(result.error) for result in chosen)
    return {
        "cases": len(chosen),
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, -(-len(errors) * 9 // 10) - 1)],
        "worst": errors[-1],
        "inside": sum(result.inside for result in chosen) / len(chosen),
        "width": statistics.median(result.width for result in chosen),
    }


def summaries(results: list[Result]) -> dict[str, dict[str, Any]]:
    """By kind of case, by engine, by architecture, and by half."""
    groups: dict[str, list[Result]] = {
        "plain": [each for each in results if each.plain],
        "other": [each for each in results if not each.plain],
        "all": results,
    }
    for half in (True, False):
        name = "even" if half else "odd"
        groups[f"plain, {name} half"] = [each for each in groups["plain"] if each.even is half]
        groups[f"other, {name} half"] = [each for each in groups["other"] if each.even is half]
    for engine in sorted({each.engine for each in results}):
        groups[engine] = [each for each in results if each.engine == engine]
    for arch in sorted({each.arch for each in results}):
        groups[arch] = [each for each in results if each.arch == arch]
    return {name: summary(group) for name, group in groups.items()}


def table(results: list[Result]) -> str:
    lines = [
        "| case | engine | architecture | unit | printed | planned | error | range | width | cause |",
        "|" + "---|" * 10,
    ]
    for each in sorted(results, key=lambda result: -abs(result.error)):
        mark = "" if each.inside else " (outside)"
        lines.append(
            f"| {each.id} | {each.engine} | {each.arch} | {each.unit} | {each.true} | {each.planned} | "
            f"{each.error:+.1%} | {each.low} – {each.high}{mark} | {each.width:.0%} | {each.cause} |"
        )
    return "\n".join(lines)


def summary_table(sums: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| cases | number | median | p90 | worst | inside the range | width |", "|" + "---|" * 7]
    for name, each in sums.items():
        if each["cases"]:
            lines.append(
                f"| {name} | {each['cases']} | {each['median']:.2%} | {each['p90']:.1%} | {each['worst']:.1%} | "
                f"{each['inside']:.0%} | {each['width']:.1%} |"
            )
    return "\n".join(lines)


def rebuilt(case: Mapping[str, Any]) -> tuple[float, float] | None:
    """vLLM's pool from its printed parts, and the printed pool, both in GiB; None where a part was not printed."""
    said = case["reported"]
    pool, budget = said.get("kv_pool_gib"), said.get("budget_gib")
    util = (case["given"].get("settings") or {}).get("gpu_memory_utilization")
    if pool is None or (budget is None and not (said.get("total_gib") and util)):
        return None
    start = budget if budget is not None else said["total_gib"] * util
    if said.get("consumed_weights_plus_nontorch_gib") is not None:
        parts = [said["consumed_weights_plus_nontorch_gib"], said.get("activation_peak_gib")]
    else:
        peak = said.get("activation_peak_gib")
        if peak is None and said.get("peak_torch_memory_gib"):
            peak = said["peak_torch_memory_gib"] - said["weights_gib"]
        parts = [said.get("weights_gib"), peak, said.get("non_torch_gib")]
        if said.get("graph_estimate_gib") and not said.get("activation_includes_graph_estimate"):
            parts.append(said["graph_estimate_gib"])
    if any(part is None for part in parts):
        return None
    return start - sum(parts), pool


def rebuild_misses(cases: Iterable[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """How many pools were rebuilt from parts, and those off by more than the larger of 0.5 % and 0.02 GiB."""
    count, misses = 0, []
    for case in cases:
        both = rebuilt(case)
        if both is None:
            continue
        count += 1
        mine, pool = both
        if abs(mine - pool) > max(0.005 * abs(pool), 0.02) + 0.0051:  # printed with two decimals
            misses.append(f"{case['id']}: {mine:.2f} for {pool:.2f} GiB")
    return count, misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every result and the summaries")
    parser.add_argument("--grades", default="AB", help="which grades of cases count")
    parser.add_argument("--parts", action="store_true", help="rebuild pools from the printed parts")
    chosen = parser.parse_args()
    cases = [case for case in load_cases() if case["grade"] in chosen.grades]
    if chosen.parts:
        count, misses = rebuild_misses(cases)
        print(f"{count} pools rebuilt from their printed parts, {len(misses)} off:", *misses, sep="\n")
        return
    results = [result for result in map(judge, cases) if result is not None]
    sums = summaries(results)
    print(table(results), summary_table(sums), sep="\n\n")
    if chosen.json:
        document = {"results": [asdict(result) for result in results], "summaries": sums}
        chosen.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
