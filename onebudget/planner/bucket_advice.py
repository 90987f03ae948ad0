"""Which graph batch sizes to capture for a load, beside what the engines' default lists do with the same memory."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError
from onebudget.graphs.buckets import default_graph_batch_sizes, hit_rate, padded_share, padded_tokens
from onebudget.graphs.engine_lists import default_lists
from onebudget.graphs.plan_buckets import plan_buckets
from onebudget.units import KIB, MIB

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger

SCHEMA = "onebudget.buckets/1"
JUDGED_FROM_SHARE = 0.002
"""A default list that wastes less than this share of its rows has nothing left to win."""
_BASE_BYTES, _BYTES_PER_REQUEST = 8 * MIB, 20 * KIB


@dataclass(frozen=True, slots=True)
class BucketCost:
    """Bytes that the graph of one batch size keeps: a fixed part and a part per request. ``basis`` says from where."""

    fixed_bytes: int
    bytes_per_request: int
    basis: str

    def __call__(self, size: int) -> int:
        return self.fixed_bytes + self.bytes_per_request * size

    def of_list(self, sizes: Sequence[int]) -> int:
        return sum(map(self, sizes))


MODELLED = BucketCost(
    _BASE_BYTES,
    _BYTES_PER_REQUEST,
    "modelled: 8 MiB and 20 KiB per request for each graph, by which SGLang's 52 default graphs take the 0.6 GiB that "
    "it prints; what capture takes once is not in it. Measure your own and give --bytes-per-bucket.",
)


def equal_cost(nbytes: int, basis: str) -> BucketCost:
    """The same bytes for every graph."""
    if nbytes < 1:
        raise ConfigError.for_field("--bytes-per-bucket", nbytes, "at least 1 byte")
    return BucketCost(nbytes, 0, basis)


def cost_of_ledger(ledger: Ledger, max_batch_size: int) -> BucketCost | None:
    """The ledger's graphs, shared equally among the sizes of its engine's default list; None where it has none."""
    held = ledger.term("graphs").bytes if any(term.name == "graphs" for term in ledger.terms) else 0
    lists = default_lists(max_batch_size)
    name = next((name for name in lists if name.lower() == ledger.engine.lower()), next(iter(lists)))
    nbytes = held // len(lists[name])
    if not nbytes:
        return None
    return equal_cost(nbytes, f"the ledger's {held:,} bytes for graphs, shared by the {len(lists[name])} of {name}")


@dataclass(frozen=True, slots=True)
class ListFigures:
    """What a list does with a load. ``padded_tokens`` counts rows of padding in the histogram's weights;
    ``padded_share`` is their share of all rows that graphs compute."""

    name: str
    sizes: tuple[int, ...]
    graph_bytes: int
    hit_rate: float
    padded_tokens: float
    padded_share: float

    @classmethod
    def of(cls, name: str, sizes: Sequence[int], histogram: Mapping[int, float], cost: BucketCost) -> ListFigures:
        return cls(
            name,
            tuple(sizes),
            cost.of_list(sizes),
            hit_rate(sizes, histogram),
            padded_tokens(sizes, histogram),
            padded_share(sizes, histogram),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sizes": list(self.sizes),
            "graph_bytes": self.graph_bytes,
            "hit_rate": round(self.hit_rate, 6),
            "padded_tokens": round(self.padded_tokens, 3),
            "padded_share": round(self.padded_share, 6),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A default list and the best list within its bytes."""

    default: ListFigures
    planned: ListFigures

    @property
    def fewer_share(self) -> float:
        """Share of the default's padding that the planned list avoids."""
        return 1 - self.planned.padded_tokens / self.default.padded_tokens if self.default.padded_tokens else 0.0

    @property
    def judged(self) -> bool:
        return self.default.padded_share >= JUDGED_FROM_SHARE

    def to_dict(self) -> dict[str, Any]:
        return {
            "default": self.default.to_dict(),
            "planned": self.planned.to_dict(),
            "fewer_share": round(self.fewer_share, 6),
            "judged": self.judged,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAdvice:
    """``recommended`` is the best list within ``allowance_bytes``; ``flags`` sets it in each engine."""

    load: str
    histogram: Mapping[int, float]
    max_batch_size: int
    allowance_bytes: int
    allowance_basis: str
    cost: BucketCost
    recommended: ListFigures
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> dict[str, str]:
        return engine_flags(self.recommended.sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": SCHEMA,
            "load": self.load,
            "max_batch_size": self.max_batch_size,
            "allowance_bytes": self.allowance_bytes,
            "allowance_basis": self.allowance_basis,
            "bytes_per_bucket": {
                "fixed_bytes": self.cost.fixed_bytes,
                "bytes_per_request": self.cost.bytes_per_request,
                "basis": self.cost.basis,
            },
            "recommended": self.recommended.to_dict(),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
            "flags": self.flags,
            "histogram": {str(size): weight for size, weight in sorted(self.histogram.items())},
            "notes": list(self.notes),
        }


def advise_buckets(
    histogram: Mapping[int, float],
    *,
    load: str,
    max_batch_size: int | None = None,
    allowance_bytes: int | None = None,
    allowance_basis: str = "given",
    cost: BucketCost = MODELLED,
    notes: Sequence[str] = (),
) -> BucketAdvice:
    """The best list for ``histogram`` (decode batch size -> weight), and how the engines' defaults compare.

    ``max_batch_size``: most requests of a step, by default the largest in the histogram. Without an allowance the list
    may take what TensorRT-LLM's default takes. Raises ``ConfigError`` for a load without weight.
    """
    if not any(weight > 0 for weight in histogram.values()):
        raise ConfigError.for_field("histogram", dict(histogram), "a load with at least one decode step")
    cap = max_batch_size or max(size for size, weight in histogram.items() if weight > 0)
    if allowance_bytes is None:
        allowance_bytes = cost.of_list(default_graph_batch_sizes(cap))
        allowance_basis = "what TensorRT-LLM's default list takes"

    def planned(name: str, allowance: int) -> ListFigures:
        plan = plan_buckets(histogram, allowance_bytes=allowance, bytes_for=cost, max_batch_size=cap)
        return ListFigures.of(name, plan.sizes, histogram, cost)

    largest = max(size for size, weight in histogram.items() if weight > 0)
    if largest < cap:
        notes = [*notes, f"No step of this load has more than {largest} requests; larger ones would find no graph."]
    defaults = [ListFigures.of(name, sizes, histogram, cost) for name, sizes in default_lists(cap).items()]
    return BucketAdvice(
        load=load,
        histogram=histogram,
        max_batch_size=cap,
        allowance_bytes=allowance_bytes,
        allowance_basis=allowance_basis,
        cost=cost,
        recommended=planned("recommended", allowance_bytes),
        comparisons=tuple(
            Comparison(default, planned(f"planned within {default.name}", default.graph_bytes)) for default in defaults
        ),
        notes=tuple(notes),
    )


def engine_flags(sizes: Sequence[int]) -> dict[str, str]:
    """The setting that gives each engine this list, ready to paste."""
    commas = ",".join(map(str, sizes))
    return {
        "TensorRT-LLM": f"cuda_graph_config: {{enable_padding: true, batch_sizes: [{commas}]}}",
        "vLLM": f"--compilation-config '{{\"cudagraph_capture_sizes\": [{commas}]}}'",
        "SGLang": f"--cuda-graph-bs {' '.join(map(str, sizes))}",
        "onebudget": f"--cuda-graph-batch-sizes {commas}",
    }


def read_histogram(path: Path) -> dict[int, float]:
    """Batch sizes and weights of a file: JSON ``{"size": weight}``, what ``onebudget simulate --json`` prints, or CSV
    lines ``size,weight`` with or without a heading. ``ConfigError`` says what is wrong and where."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, f"it can't be read: {getattr(error, 'strerror', None) or error}") from error
    pairs = _json_pairs(path, text) if text.lstrip().startswith("{") else _csv_pairs(text)
    histogram: dict[int, float] = {}
    for where, size, weight in pairs:
        number, amount = _pair(path, where, size, weight)
        histogram[number] = histogram.get(number, 0) + amount
    if not histogram:
        raise _unusable(path, "it holds no batch size")
    return histogram


def _json_pairs(path: Path, text: str) -> list[tuple[str, Any, Any]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _unusable(path, f"its JSON is broken: {error}") from error
    inner = document.get("batch_size_histogram", document.get("histogram", document))
    if not isinstance(inner, dict):
        raise _unusable(path, "its histogram is no JSON object")
    return [(f"key {size!r}", size, weight) for size, weight in inner.items()]


def _csv_pairs(text: str) -> list[tuple[str, Any, Any]]:
    rows = [(number, row) for number, row in enumerate(csv.reader(text.splitlines()), start=1) if any(row)]
    if rows and not rows[0][1][0].strip().lstrip("-").isdigit():
        rows = rows[1:]
    return [(f"line {number}", row[0].strip(), row[1] if len(row) == 2 else None) for number, row in rows]


def _pair(path: Path, where: str, size: Any, weight: Any) -> tuple[int, float]:
    if not str(size).isdecimal() or int(size) < 1:
        raise _unusable(path, f"{where}: {size!r} is no batch size of at least 1")
    try:
        amount = math.nan if isinstance(weight, bool) else float(weight)
    except (TypeError, ValueError):
        amount = math.nan
    if not 0 <= amount < math.inf:
        raise _unusable(path, f"{where}: {weight!r} is no weight of at least 0")
    return int(size), amount


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f'{path} is not a usable histogram: {reason.rstrip(".")}. It is JSON like {{"8": 120}} or lines like 8,120.',
        field="--histogram",
        value=str(path),
        allowed="batch sizes with their weights",
    )
