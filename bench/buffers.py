"""Allocation and free, as a user calls them, beside other allocators on the same machine and in the same run.

A pair is one ``BufferManager.gpu(n).release()``, or the peer's nearest equivalent; "touched" pairs also write every
byte in between. In "two alive" a buffer and one of another size and owner are alive together and go in the order they
came, so that nothing can simply be handed out again. All contenders of a size take turns, round by round, so that a
drifting machine hits all of them. Microseconds per pair are a round's time over its pairs: median of the rounds with
quartiles and minimum. p99 comes from pairs timed one by one. Ratios are ours over the peer, round by round: below 1 we
are faster.

Peers: the pool path beside torch's own allocator and NumPy, the virtual path beside a fresh anonymous mapping. On a
GPU: torch's caching allocator, and RMM where it can be imported. No wrappers are on.

    python bench/buffers.py [--device host] [--rounds 15] [--json-file out.json]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from onebudget.buffers import BufferManager, virtual_memory_scope
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.units import GIB, KIB, MIB, format_bytes, parse_bytes

SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB)
ROUND_SECONDS = 0.02
SINGLE_PAIRS = 200
Pair = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """``pair`` makes ``pairs`` of them; with ``virtual`` inside a scope. ``peer_of``: whose ratio it is the base of."""

    name: str
    pair: Pair
    pairs: int = 1
    virtual: bool = False
    peer_of: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds per pair of one contender at one size; ``ratios`` are of the contender it is a peer of."""

    size_bytes: int
    touched: bool
    name: str
    pairs_per_second: float
    median_us: float
    quartiles_us: tuple[float, float]
    minimum_us: float
    p99_us: float
    peer_of: str | None
    ratio_median: float | None
    ratio_quartiles: tuple[float, float] | None
    round_us: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host", help="host, or cuda[:N]")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=SIZES)
    parser.add_argument("--json-file", type=Path)
    arguments = parser.parse_args()
    options = {"capacity_bytes": 1 * GIB} if arguments.device == "host" else {}
    with open_device(arguments.device, **options) as device:
        manager = BufferManager(device.create_stream())
        rows = [
            row
            for size in arguments.sizes
            for touched in (False, True)
            for row in measure(device, contenders(manager, size, touched), size, touched, arguments.rounds)
        ]
        document = {**conditions(device), "rounds": arguments.rounds, "rows": [asdict(row) for row in rows]}
    show(rows, document)
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(document, indent=1))


def contenders(manager: BufferManager, size: int, touched: bool) -> list[Contender]:
    """Ours first; every peer allocates the same bytes."""
    peers = cuda_peers(manager, size, touched) if manager.device.kind == "cuda" else host_peers(size, touched)
    pair = our_pair(manager, size, touched)
    ours = [Contender("pool", pair), Contender("virtual", pair, virtual=True)]
    return [*ours, *peers, *([] if touched else two_alive(manager, size))]


def our_pair(manager: BufferManager, size: int, touched: bool) -> Pair:
    def plain() -> None:
        manager.gpu(size).release()

    def write() -> None:
        buffer = manager.gpu(size)
        ctypes.memset(buffer.data_ptr, 1, size)
        buffer.release()

    def fill() -> None:
        buffer = manager.gpu(size)
        manager.set_mem(buffer, 1)
        buffer.release()

    return plain if not touched else write if manager.device.host_addressable else fill


def two_alive(manager: BufferManager, size: int) -> list[Contender]:
    where = torch.device("cpu" if manager.device.host_addressable else manager.device.torch_device)

    def with_pool() -> None:
        first, second = manager.gpu(size), manager.gpu(size + 4096, owner="other")
        first.release()
        second.release()

    def with_torch() -> None:
        first = torch.empty(size, dtype=torch.uint8, device=where)
        second = torch.empty(size + 4096, dtype=torch.uint8, device=where)
        del first
        del second

    pool = Contender("pool, two alive", with_pool, pairs=2)
    return [pool, Contender("torch, two alive", with_torch, pairs=2, peer_of=pool.name)]


def host_peers(size: int, touched: bool) -> list[Contender]:
    def with_torch() -> None:
        tensor = torch.empty(size, dtype=torch.uint8)
        if touched:
            ctypes.memset(tensor.data_ptr(), 1, size)

    def with_numpy() -> None:
        array = np.empty(size, np.uint8)
        if touched:
            ctypes.memset(array.__array_interface__["data"][0], 1, size)

    def with_mmap() -> None:
        mapping = mmap.mmap(-1, size)
        if touched:
            start = ctypes.c_char.from_buffer(mapping)
            ctypes.memset(ctypes.addressof(start), 1, size)
            del start
        mapping.close()

    return [
        Contender("torch.empty", with_torch, peer_of="pool"),
        Contender("numpy.empty", with_numpy, peer_of="pool"),
        Contender("mmap", with_mmap, peer_of="virtual"),
    ]


def cuda_peers(manager: BufferManager, size: int, touched: bool) -> list[Contender]:
    where = manager.device.torch_device

    def with_torch() -> None:
        tensor = torch.empty(size, dtype=torch.uint8, device=where)
        if touched:
            tensor.fill_(1)

    peers = [Contender("torch caching allocator", with_torch, peer_of="pool")]
    try:
        rmm: Any = import_module("rmm")
    except ImportError:
        return peers
    resource = rmm.mr.CudaAsyncMemoryResource()
    stream = rmm.pylibrmm.stream.Stream(obj=manager.stream.as_torch())  # type: ignore[attr-defined]

    def with_rmm() -> None:
        buffer = rmm.DeviceBuffer(size=size, stream=stream, mr=resource)
        if touched:
            manager.device.fill(buffer.ptr, 1, size, manager.stream)

    return [*peers, Contender("rmm async", with_rmm, peer_of="pool")]


def measure(device: Device, field: Sequence[Contender], size: int, touched: bool, rounds: int) -> list[Row]:
    counts = {one.name: pairs_per_round(one, device) for one in field}
    times: dict[str, list[float]] = {one.name: [] for one in field}
    singles: dict[str, list[float]] = {one.name: [] for one in field}
    with quiet():
        for number in range(rounds):
            start = number % len(field)
            for one in (*field[start:], *field[:start]):
                with scope(one):
                    times[one.name].append(timed_round(one, counts[one.name]))
                    singles[one.name] += timed_singles(one, min(counts[one.name], SINGLE_PAIRS))
                device.synchronize()
    return [row_of(one, size, touched, times, singles) for one in field]


def pairs_per_round(one: Contender, device: Device) -> int:
    """As many as fill a round; also warms up."""
    with scope(one):
        timed_round(one, 5)
        device.synchronize()
        seconds = timed_round(one, 5) * one.pairs / 1e6
        device.synchronize()
    return max(5, min(10_000, int(ROUND_SECONDS / seconds)))


def timed_round(one: Contender, count: int) -> float:
    """Microseconds per pair."""
    pair = one.pair
    started = time.perf_counter_ns()
    for _ in range(count):
        pair()
    return (time.perf_counter_ns() - started) / (count * one.pairs) / 1e3


def timed_singles(one: Contender, count: int) -> list[float]:
    clock, pair, scale = time.perf_counter_ns, one.pair, one.pairs * 1e3
    marks = [clock()]
    for _ in range(count):
        pair()
        marks.append(clock())
    return [(after - before) / scale for before, after in itertools.pairwise(marks)]


@contextmanager
def scope(one: Contender) -> Iterator[None]:
    if not one.virtual:
        yield
        return
    with virtual_memory_scope("bench"):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def row_of(
    one: Contender, size: int, touched: bool, times: dict[str, list[float]], singles: dict[str, list[float]]
) -> Row:
    mine = times[one.name]
    ratios = [ours / peer for ours, peer in zip(times[one.peer_of], mine, strict=True)] if one.peer_of else []
    return Row(
        size_bytes=size,
        touched=touched,
        name=one.name,
        pairs_per_second=1e6 / statistics.median(mine),
        median_us=statistics.median(mine),
        quartiles_us=quartiles(mine),
        minimum_us=min(mine),
        p99_us=sorted(singles[one.name])[int(len(singles[one.name]) * 0.99)],
        peer_of=one.peer_of,
        ratio_median=statistics.median(ratios) if ratios else None,
        ratio_quartiles=quartiles(ratios) if ratios else None,
        round_us=mine,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def conditions(device: Device) -> dict[str, Any]:
    return {
        "device": {"name": device.name, "kind": device.kind, "total_bytes": device.total_bytes},
        "machine": {"cpu": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def show(rows: Sequence[Row], document: dict[str, Any]) -> None:
    load = document["machine"]["load"][0]
    machine = f"load {load:.1f} on {document['machine']['cpus']} CPUs"
    title = f"{document['device']['name']}, {document['rounds']} rounds, {machine}"
    table = Table(title=title)
    for column in ("size", "touched", "allocator", "µs/pair", "quartiles", "min", "p99", "pairs/s", "ours / this"):
        table.add_column(column, justify="left" if column == "allocator" else "right")
    for row in rows:
        ratio = "" if row.ratio_median is None else f"{row.ratio_median:.2f} ({row.peer_of})"
        table.add_row(
            format_bytes(row.size_bytes), "yes" if row.touched else "", row.name, f"{row.median_us:.2f}",
            f"{row.quartiles_us[0]:.2f}-{row.quartiles_us[1]:.2f}", f"{row.minimum_us:.2f}", f"{row.p99_us:.1f}",
            f"{row.pairs_per_second:,.0f}", ratio, end_section=row is rows[-1],
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
