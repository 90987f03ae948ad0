"""Other planners beside ours: the 16-bit cases of one pipeline stage whose tokens vLLM or SGLang printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accuracy_cases import config_of, request_for
from planner_peers import Peers, Question

from onebudget.errors import OneBudgetError
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.formats import weight_format

if TYPE_CHECKING:
    from accuracy import Result

NAMES = ("kvfit", "modelinfo")


def side_by_side(cases: Iterable[Mapping[str, Any]], results: Iterable[Result], bin_folder: Path) -> str:
    """A table of errors, ours and theirs, and the medians over the cases that each answers."""
    by_id = {result.id: result for result in results}
    peers = Peers(bin_folder)
    try:
        rows = [row for case in cases if case["id"] in by_id and (row := _row(case, by_id[case["id"]], peers))]
    finally:
        peers.close()
    lines = [f"| case | printed | onebudget | {' | '.join(NAMES)} |", "|---|---|---|" + "---|" * len(NAMES)]
    lines += ["| " + " | ".join((name, str(true), *map(_text, errors))) + " |" for name, true, errors in rows]
    lines.append("| median | | " + " | ".join(_median(errors[at] for *_, errors in rows) for at in range(3)) + " |")
    shared = [errors for *_, errors in rows if None not in errors]
    for at, name in enumerate(NAMES, start=1):
        both = [errors for *_, errors in rows if errors[at] is not None]
        lines.append(
            f"| where {name} answers | {len(both)} cases | {_median(e[0] for e in both)} |"
            + "".join(
                f" {_median(e[at] for e in both)} |" if other == at else " |" for other in range(1, len(NAMES) + 1)
            )
        )
    lines.append(
        f"| where all answer | {len(shared)} cases | "
        + " | ".join(_median(errors[at] for errors in shared) for at in range(1 + len(NAMES)))
        + " |"
    )
    return "\n".join(lines)


def _row(case: Mapping[str, Any], result: Result, peers: Peers) -> tuple[str, int, list[float | None]] | None:
    question = _question(case)
    if question is None or result.engine not in ("vllm", "sglang") or result.unit == "bytes":
        return None
    true = result.true * (16 if result.unit == "blocks" else 1)
    answers = _answers(peers, question)
    return case["id"], true, [result.error, *(_error(answers.get(name), true) for name in NAMES)]


def _answers(peers: Peers, question: Question) -> dict[str, int | None]:
    """None by name where no weights file can be made of the config, which the peers want to read."""
    try:
        return peers.answers(question)
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _question(case: Mapping[str, Any]) -> Question | None:
    engine, request = request_for(case)
    config = config_of(case)
    dims = dims_from_config(config, request.model.name)
    if weight_format(request.weights_dtype, dims.quantization, dims.name).name != "bf16" or request.layout.pp > 1:
        return None
    try:
        cap = policy_for(engine).plan(request).caps[0]
    except OneBudgetError:
        return None
    length = request.settings.get("max_model_len") or request.settings.get("context_length") or dims.max_len or 4096
    total = request.total_bytes or request.gpu.total_bytes
    return Question(config, total, float(cap.value or 0.9), request.layout.tp, int(str(length)))


def _error(tokens: int | None, true: int) -> float | None:
    return None if tokens is None else tokens / true - 1


def _text(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"


def _median(errors: Iterable[float | None]) -> str:
    known = [abs(error) for error in errors if error is not None]
    return f"{statistics.median(known):.1%}" if known else "–"
