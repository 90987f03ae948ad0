"""The best list of graph batch sizes for a load and a memory allowance. Exact, and no torch.

A list costs the sum of its entries' bytes. Among the lists within the allowance the best one lets most of the load meet
a graph, then pads least, then takes fewest bytes, then is the smallest in lexicographic order. The first goal fixes the
largest entry; the others make a shortest path through the sizes with a limit on bytes, see ``bucket_search``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from onebudget.errors import ConfigError
from onebudget.graphs.bucket_search import Sizes, cheapest_list


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """``sizes`` ascend. ``padded_tokens`` and ``hit_rate`` are those of the histogram the plan was made for: rows of
    padding in its own weights, and the share of its weight that meets a graph."""

    sizes: tuple[int, ...]
    graph_bytes: int
    padded_tokens: float
    hit_rate: float
    allowance_bytes: int

    @property
    def capture_order(self) -> tuple[int, ...]:
        """Largest first, so that smaller graphs live in the memory of larger ones."""
        return self.sizes[::-1]


def plan_buckets(
    histogram: Mapping[int, float],
    *,
    allowance_bytes: int,
    bytes_for: Callable[[int], int],
    max_batch_size: int | None = None,
) -> BucketPlan:
    """Choose among the batch sizes in ``histogram`` (batch size -> weight, such as steps or seconds).

    ``bytes_for(size)``: what the graph of one size keeps for good. Sizes above ``max_batch_size`` are not captured;
    their weight counts as missed. Nothing that fits, or no load: an empty list. Raises ``ConfigError`` for weights or
    bytes that are no finite amounts of at least 0.
    """
    if allowance_bytes < 0:
        raise ConfigError.for_field("allowance_bytes", allowance_bytes, "at least 0")
    weights = {size: _weight(size, histogram[size]) for size in sorted(histogram)}
    total = sum(weights.values(), Fraction(0))
    runnable = [size for size in weights if max_batch_size is None or size <= max_batch_size]
    if not runnable or not total:
        return BucketPlan((), 0, 0.0, 0.0, allowance_bytes)
    scale = math.lcm(*(weight.denominator for weight in weights.values()))
    sizes = Sizes.of(
        runnable, [int(weights[size] * scale) for size in runnable], [_bytes(bytes_for, s) for s in runnable]
    )
    found = cheapest_list(sizes, allowance_bytes)
    if found is None:
        return BucketPlan((), 0, 0.0, 0.0, allowance_bytes)
    hit = sum((weights[size] for size in runnable if size <= found.chosen[-1]), Fraction(0))
    padding = Fraction(found.padding, scale)
    return BucketPlan(found.chosen, found.nbytes, float(padding), float(hit / total), allowance_bytes)


def _weight(size: int, weight: float) -> Fraction:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError.for_field("histogram", size, "batch sizes of at least 1 with their weights")
    if not math.isfinite(weight) or weight < 0:
        raise ConfigError.for_field(f"histogram[{size}]", weight, "a finite weight of at least 0")
    return Fraction(weight)


def _bytes(bytes_for: Callable[[int], int], size: int) -> int:
    nbytes = bytes_for(size)
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ConfigError.for_field(f"bytes_for({size})", nbytes, "whole bytes, at least 0")
    return nbytes


@dataclass(frozen=True, slots=True)
class CaptureLadder:
    """``sizes`` in capture order, and what was cut, in the same order."""

    sizes: tuple[int, ...]
    dropped: tuple[int, ...]
    free_after_bytes: int


def capture_ladder(
    sizes: Iterable[int], *, free_bytes: int, floor_bytes: int, bytes_for: Callable[[int], int]
) -> CaptureLadder:
    """What can be captured, largest first, while ``floor_bytes`` stay free throughout.

    A size that would go below the floor is left out and the next smaller one is tried. The largest that fits comes
    first, so a cut ladder loses small sizes, whose batches are then padded more, before it loses hits.
    """
    kept: list[int] = []
    dropped: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        nbytes = bytes_for(size)
        fits = free_bytes - nbytes >= floor_bytes
        (kept if fits else dropped).append(size)
        free_bytes -= nbytes if fits else 0
    return CaptureLadder(tuple(kept), tuple(dropped), free_bytes)
