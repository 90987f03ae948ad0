"""Plans against what real engines printed: every case planned from its settings alone.

    python bench/accuracy.py [--cases FILE] [--grades AB] [--json FILE] [--peers BIN_FOLDER] [--parts]

The error is in KV tokens where the engine printed them, else in blocks or bytes. ``--cases`` takes further cases of the
same form, or as collected from logs, with configs in a folder beside them. ``--parts`` gives each engine's equation the
printed parts instead, and checks that the pool follows. ``--peers`` asks other planners the same 16-bit questions. Only
the ``GIVEN`` keys of a case are read to plan.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accuracy_cases import CASES, load_cases, request_for, truth
from accuracy_parts import rebuild_misses

from onebudget.budget.ledger import Ledger
from onebudget.errors import ConfigError, ModelError, OneBudgetError
from onebudget.planner.policies import policy_for
from onebudget.units import GIB

PLAIN = ("dense", "moe", "mla_moe")


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


def planned(ledger: Ledger, unit: str) -> tuple[int, int, int]:
    """The plan's figure in that unit, and its bounds. Where a longest request does not fit, the ledger leaves the bytes
    of the pool unassigned: the log of a refused start names them all the same."""
    kv = ledger.kv_cache
    low_bytes, high_bytes = kv.low_bytes or 0, kv.high_bytes or 0
    pool = kv.bytes or max(ledger.unassigned_bytes, 0)
    if unit == "tokens":
        low, high = kv.low_tokens or 0, kv.high_tokens or 0
        share = low / low_bytes if low_bytes else high / max(high_bytes, 1)
        return kv.tokens or int(pool * share), low, high
    if unit == "bytes":
        return pool, low_bytes, high_bytes
    per_block = max(kv.bytes_per_token * kv.tokens_per_block, 1)
    return pool // per_block, low_bytes // per_block, high_bytes // per_block


def judge(case: Mapping[str, Any]) -> Result | None:
    """The case planned and compared; None where it can't be (no figure, no config, unknown card)."""
    said = truth(case)
    if said is None:
        return None
    try:
        engine, request = request_for(case)
    except (ConfigError, ModelError):
        return None
    try:
        policy = policy_for(engine)
        ledger = policy.widened(request, policy.plan(request))
    except ModelError:
        return None
    except OneBudgetError as error:
        return _result(case, engine, said, (0, 0, 0), str(error))
    guess, low, high = planned(ledger, said[0])
    return _result(case, engine, said, (guess, low, high), cause(case, ledger))


def _result(
    case: Mapping[str, Any], engine: str, said: tuple[str, int], plan: tuple[int, int, int], why: str
) -> Result:
    (unit, true), (guess, low, high) = said, plan
    return Result(
        id=case["id"], engine=engine, arch=case["arch"], grade=case["grade"], unit=unit, true=true, planned=guess,
        error=guess / true - 1, low=low, high=high, inside=low <= true <= high, width=(high - low) / max(guess, 1),
        cause=why, plain=case["arch"] in PLAIN and (case["given"].get("pp") or 1) == 1, even=is_even(case["id"]),
    )  # fmt: skip


def refusals(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """Cases with a printed pool, a config and a card or a total that can't be planned, and why."""
    found = []
    for case in cases:
        given = case["given"]
        card = given.get("gpu") or {}
        if truth(case) is None or not given.get("config") or not (card.get("name") or card.get("total_gib")):
            continue
        try:
            engine, request = request_for(case)
            policy_for(engine).plan(request)
        except OneBudgetError as error:
            found.append(f"{case['id']}: {error}")
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES / "engine_logs.jsonl", help="cases, one a line")
    parser.add_argument("--json", type=Path, help="write every result and the summaries")
    parser.add_argument("--grades", default="AB", help="which grades of cases count")
    parser.add_argument("--peers", type=Path, help="folder with the programs of other planners")
    parser.add_argument("--parts", action="store_true", help="rebuild pools from the printed parts, of all grades")
    chosen = parser.parse_args()
    everything = load_cases(chosen.cases)
    if chosen.parts:
        counts, misses = rebuild_misses(everything)
        print(f"pools rebuilt from their printed parts: {counts}, {len(misses)} off:", *misses, sep="\n")
        return
    cases = [case for case in everything if case["grade"] in chosen.grades]
    results = [result for result in map(judge, cases) if result is not None]
    sums = summaries(results)
    print(table(results), summary_table(sums), "Not planned:\n" + "\n".join(refusals(cases)), sep="\n\n")
    if chosen.peers:
        from accuracy_peers import side_by_side

        print("", side_by_side(cases, results, chosen.peers), sep="\n")
    if chosen.json:
        document = {"results": [asdict(result) for result in results], "summaries": sums}
        chosen.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
