"""Decode through graphs beside the same steps run eagerly, on this machine: same engine, weights, rows and lengths.

Each round runs one step both ways in turn, first one then the other, so that a drifting machine hits both. Figures are
medians with quartiles; ratios are eager time over graph time of the same round: above 1 the graph is faster. A step is
everything from the batch to its logits: inputs written, tables built, forward. Sampling is the same on both sides.

    python bench/graphs.py [--rounds 41] [--dtype auto|bf16|fp32] [--batch 1 4 8] [--tokens 128 512] [--json-file F]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from onebudget import LLM, SamplingParams
from onebudget.core import Request, RequestState, ScheduledBatch
from onebudget.models.demo import ensure_demo_model

QUARTILES = 4


@dataclass(frozen=True, slots=True)
class Row:
    batch_size: int
    attended_tokens: int
    eager_ms: float
    graph_ms: float
    ratio_median: float
    ratio_quartiles: tuple[float, float]
    rounds: int
    operations: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--json-file", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    knobs: dict[str, Any] = {"device_memory": "2GiB", "max_seq_len": 2048, "max_batch_size": max(arguments.batch)}
    with LLM(ensure_demo_model(), dtype=arguments.dtype, **knobs) as llm:
        rows = [compare(llm, size, tokens, arguments.rounds) for tokens in arguments.tokens for size in arguments.batch]
        graphs = llm.engine.executor.runner.graphs
        assert graphs is not None
        document = {
            "dtype": llm.engine.station.model.dtype,
            "threads": torch.get_num_threads(),
            "graph_term_bytes": llm.budget.term("graphs").bytes,
            "pool_bytes": graphs.runner.pool_bytes,
            "scratch_bytes": graphs.scratch_bytes,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
    show(rows, document)
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(document, indent=1))


def compare(llm: LLM, size: int, tokens: int, rounds: int) -> Row:
    """One decode step of ``size`` requests that attend to about ``tokens`` each, both ways, ``rounds`` times."""
    runner = llm.engine.executor.runner
    graphs = runner.graphs
    assert graphs is not None
    members = requests_of(llm, size, tokens)
    batch = ScheduledBatch(generation=members)
    key = graphs.choose(batch)
    assert key is not None

    @torch.inference_mode()
    def eager() -> torch.Tensor:
        return runner._eager(batch)

    @torch.inference_mode()
    def replay() -> torch.Tensor:
        return graphs.run(batch, key)

    assert torch.equal(eager().argmax(-1), replay().argmax(-1))
    times: dict[Callable[[], torch.Tensor], list[float]] = {eager: [], replay: []}
    for number in range(rounds):
        for side in (eager, replay) if number % 2 == 0 else (replay, eager):
            started = time.perf_counter()
            side()
            times[side].append(time.perf_counter() - started)
    for request in members:
        llm.engine.executor.kv.free(request)
    operations = getattr(graphs.runner.graphs[key], "operations", 0)
    ratios = [slow / fast for slow, fast in zip(times[eager], times[replay], strict=True)]
    quartiles = statistics.quantiles(ratios, n=QUARTILES) if rounds > 1 else ratios * 3
    return Row(
        size, tokens, 1e3 * statistics.median(times[eager]), 1e3 * statistics.median(times[replay]),
        statistics.median(ratios), (quartiles[0], quartiles[-1]), rounds, operations,
    )  # fmt: skip


def requests_of(llm: LLM, size: int, tokens: int) -> list[Request]:
    """Requests behind prompts of ``tokens`` and a few fewer, each with blocks for its next token."""
    executor = llm.engine.executor
    ids = llm.tokenizer("The lighthouse keeper climbed the stairs every evening and lit the lamp. " * 60).input_ids
    members = []
    for number in range(size):
        prompt = ids[number : number + tokens - 3 * number]
        request = Request(1000 + number, prompt, SamplingParams(temperature=0), max_new_tokens=4)
        executor.kv.begin(request)
        request.state, request.chunk_tokens = RequestState.CONTEXT, request.prompt_tokens - request.computed_tokens
        context = ScheduledBatch(context_last=[request])
        executor.kv.prepare(context)
        logits = executor.runner.forward(context)
        request.computed_tokens += request.chunk_tokens
        request.state = RequestState.GENERATION
        request.output_token_ids.append(int(logits[0].argmax()))
        members.append(request)
    executor.kv.prepare(ScheduledBatch(generation=members))
    return members


def show(rows: Sequence[Row], document: dict[str, Any]) -> None:
    pool = document["pool_bytes"] / 2**20
    title = f"{document['dtype']}, {document['threads']} threads, pool of graphs {pool:.1f} MiB"
    table = Table(title=title)
    for column in ("batch", "attended", "eager ms", "graph ms", "ratio", "quartiles", "operations"):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row.ratio_quartiles
        table.add_row(
            str(row.batch_size), str(row.attended_tokens), f"{row.eager_ms:.2f}", f"{row.graph_ms:.2f}",
            f"{row.ratio_median:.3f}", f"{low:.3f}-{high:.3f}", str(row.operations),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
