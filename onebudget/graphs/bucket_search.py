"""A shortest path with a limit on bytes: which sizes to capture so that padding is least.

Nodes are sizes; the arc from ``i`` to ``j`` means that batches above ``i`` are padded to ``j``. A price on bytes turns
the limited problem into plain shortest paths, which the lines of a lower envelope solve in linear time. The best price
gives a lower bound on what any partial list can still become. Dynamic programming over partial lists then finds the
exact answer: a list is dropped once its bound says that it can't be best, or once another is better in padding and in
bytes. All numbers are integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

FIRST_GUESS = 64
"""The first guess of the least padding lies this part of the way from its lower to its upper bound."""
_PRICES = ((1, 2), (3, 4), (7, 8), (1, 1), (9, 8), (5, 4), (3, 2), (2, 1))
"""Multiples of the best price. For a partial list that is ahead or behind on bytes another one bounds better."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ascending batch sizes with their weights and bytes; position 0 stands for "no size below"."""

    size: Sequence[int]
    nbytes: Sequence[int]
    weight_to: Sequence[int]  # sum of weights up to a position
    rows_to: Sequence[int]  # sum of weight * size up to a position

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[int], nbytes: Sequence[int]) -> Sizes:
        rows = (weight * size for weight, size in zip(weights, sizes, strict=True))
        return cls((0, *sizes), (0, *nbytes), [0, *accumulate(weights)], [0, *accumulate(rows)])

    def padding(self, below: int, at: int) -> int:
        """Padding of the batches above ``below`` and up to ``at`` when they are padded to ``at``."""
        weight = self.weight_to[at] - self.weight_to[below]
        return self.size[at] * weight - (self.rows_to[at] - self.rows_to[below])


class Found(NamedTuple):
    padding: int
    nbytes: int
    chosen: tuple[int, ...]


class _Partial(NamedTuple):
    """The upper part of a list, from ``at`` on."""

    padding: int
    nbytes: int
    at: int
    above: _Partial | None

    def positions(self) -> Iterator[int]:
        part: _Partial | None = self
        while part is not None:
            yield part.at
            part = part.above


class _Path(NamedTuple):
    padding: int
    nbytes: int


def cheapest_list(sizes: Sizes, allowance: int) -> Found | None:
    """The best list whose bytes are within ``allowance``; None when not a single size fits."""
    usable = [at for at in range(1, len(sizes.size)) if sizes.nbytes[at] <= allowance]
    if not usable:
        return None
    most = sizes.weight_to[usable[-1]]
    tops = [at for at in usable if sizes.weight_to[at] == most]
    return _Search(sizes, usable, tops, allowance).best()


class _Bound(NamedTuple):
    """A price per byte, and for each position the least cost of the lists below it at that price."""

    numerator: int
    denominator: int
    to: dict[int, int]

    def least(self, tops: list[int], sizes: Sizes, allowance: int) -> int:
        """No list within ``allowance`` pads less."""
        cost = min(self.to[top] + self.numerator * sizes.nbytes[top] for top in tops) - self.numerator * allowance
        return max(0, -(-cost // self.denominator))

    def ceiling(self, at: int, limit: int, allowance: int) -> int:
        """The most that a partial list from ``at`` on may have cost to end within ``limit`` and ``allowance``."""
        return self.denominator * limit + self.numerator * allowance - self.to[at]


class _Search:
    def __init__(self, sizes: Sizes, usable: list[int], tops: list[int], allowance: int) -> None:
        self._sizes = sizes
        self._usable = usable
        self._tops = tops
        self._allowance = allowance

    def best(self) -> Found:
        """The limit is guessed low and raised until a list lies within it: a search that finds one has looked at all
        that could be better, and low limits make it short."""
        (numerator, denominator), highest = self._price()
        bounds = [self._bound(numerator * up, denominator * down) for up, down in _PRICES] if numerator else []
        main = self._bound(numerator, denominator)
        lowest = main.least(self._tops, self._sizes, self._allowance)
        step = max(1, (highest - lowest) // FIRST_GUESS)
        limit = min(lowest + step, highest)
        while True:
            found = self._lists(main, bounds, limit)
            if found is not None:
                return found
            assert limit < highest, "the list that set the limit is among those searched"
            step *= 2
            limit = min(lowest + step, highest)

    def _bound(self, numerator: int, denominator: int) -> _Bound:
        to = self._cheapest_to(numerator, denominator)
        return _Bound(numerator, denominator, {at: cost for at, (cost, _) in to.items()})

    # -- the price of a byte ----------------------------------------------------------------------------------

    def _price(self) -> tuple[tuple[int, int], int]:
        """The price of a byte, as a fraction of padding, at which the bound is tightest; and the least padding of the
        lists within the allowance that were met on the way."""
        free = self._path(0, 1)
        if free.nbytes <= self._allowance:
            return (0, 1), free.padding
        cheap = min(self._alone(top) for top in self._tops if self._alone(top).nbytes <= self._allowance)
        while True:
            price = cheap.padding - free.padding, free.nbytes - cheap.nbytes
            found = self._path(*price)
            if _cost(found, price) >= _cost(cheap, price):
                return price, cheap.padding
            if found.nbytes <= self._allowance:
                cheap = found
            else:
                free = found

    def _alone(self, top: int) -> _Path:
        return _Path(self._sizes.padding(0, top), self._sizes.nbytes[top])

    def _path(self, numerator: int, denominator: int) -> _Path:
        """The cheapest list at a price per byte; of equally cheap ones some list."""
        to = self._cheapest_to(numerator, denominator)
        at = min(self._tops, key=lambda top: to[top][0] + numerator * self._sizes.nbytes[top])
        padding = nbytes = 0
        while at:
            below = to[at][1]
            padding += self._sizes.padding(below, at)
            nbytes += self._sizes.nbytes[at]
            at = below
        return _Path(padding, nbytes)

    def _cheapest_to(self, numerator: int, denominator: int) -> dict[int, tuple[int, int]]:
        """For each usable position: the least of ``denominator * padding + numerator * bytes`` over all lists below
        it, its own padding included and its own bytes not, and the next position of such a list.

        Seen from ``j`` each ``i`` below offers a line in the size of ``j`` with slope minus the weight up to ``i``.
        Slopes fall as ``i`` grows and sizes ascend, so the best line only moves on.
        """
        sizes, result = self._sizes, dict[int, tuple[int, int]]()
        lines, best = [(0, 0, 0)], 0  # slope, height at size 0, position
        for at in self._usable:
            size = sizes.size[at]
            best = min(best, len(lines) - 1)
            while best + 1 < len(lines) and _height(lines[best + 1], size) <= _height(lines[best], size):
                best += 1
            own = denominator * (size * sizes.weight_to[at] - sizes.rows_to[at])
            result[at] = own + _height(lines[best], size), lines[best][2]
            height = result[at][0] + numerator * sizes.nbytes[at] + denominator * sizes.rows_to[at]
            _add_line(lines, (-denominator * sizes.weight_to[at], height, at))
        return result

    # -- lists ------------------------------------------------------------------------------------------------

    def _lists(self, main: _Bound, others: list[_Bound], limit: int) -> Found | None:
        """The best list of at most ``limit`` padding, built from the largest entry down; None when there is none."""
        sizes, allowance = self._sizes, self._allowance
        parts: dict[int, list[_Partial]] = {top: [_Partial(0, sizes.nbytes[top], top, None)] for top in self._tops}
        best: _Partial | None = None
        for at in reversed(self._usable):
            tests = [(bound.denominator, bound.numerator, bound.ceiling(at, limit, allowance)) for bound in others]
            front = [
                part
                for part in _undominated(parts.pop(at, []))
                if all(down * part.padding + up * part.nbytes <= most for down, up, most in tests)
            ]
            if not front:
                continue
            ends = self._ends(front, at)
            best = min(ends if best is None else [best, *ends], key=_order)
            self._extend(parts, front, at, main, main.ceiling(at, limit, allowance))
        if best is None or best.padding > limit:
            return None
        return Found(best.padding, best.nbytes, tuple(sizes.size[at] for at in best.positions() if at))

    def _extend(
        self, parts: dict[int, list[_Partial]], front: list[_Partial], at: int, main: _Bound, ceiling: int
    ) -> None:
        """Put each size below ``at`` under each partial list, where the bound allows it."""
        sizes, up, down = self._sizes, main.numerator, main.denominator
        spare = [ceiling - down * part.padding - up * part.nbytes for part in front]
        room = max(spare)
        for below in self._usable:
            if below >= at:
                break
            padding, nbytes = sizes.padding(below, at), sizes.nbytes[below]
            slack = down * padding + up * nbytes + main.to[below] - main.to[at]
            if slack <= room:
                parts.setdefault(below, []).extend(
                    _Partial(part.padding + padding, part.nbytes + nbytes, below, part)
                    for part, left in zip(front, spare, strict=True)
                    if left >= slack and part.nbytes + nbytes <= self._allowance
                )

    def _ends(self, front: list[_Partial], at: int) -> list[_Partial]:
        last = self._sizes.padding(0, at)
        return [_Partial(part.padding + last, part.nbytes, 0, part) for part in front]


def _cost(path: _Path, price: tuple[int, int]) -> int:
    return price[1] * path.padding + price[0] * path.nbytes


def _order(part: _Partial) -> tuple[int, int, tuple[int, ...]]:
    return part.padding, part.nbytes, tuple(part.positions())


def _undominated(parts: list[_Partial]) -> list[_Partial]:
    """Those that no other beats in padding and bytes; of equal ones the smallest in lexicographic order."""
    kept: list[_Partial] = []
    for part in sorted(parts, key=lambda part: part[:2]):
        if not kept or part.nbytes < kept[-1].nbytes:
            kept.append(part)
        elif part[:2] == kept[-1][:2] and tuple(part.positions()) < tuple(kept[-1].positions()):
            kept[-1] = part
    return kept


def _height(line: tuple[int, int, int], size: int) -> int:
    return line[0] * size + line[1]


def _add_line(lines: list[tuple[int, int, int]], line: tuple[int, int, int]) -> None:
    """Append a line of lower (or the same) slope, and drop those that are now nowhere lowest."""
    if lines[-1][0] == line[0]:
        if lines[-1][1] <= line[1]:
            return
        lines.pop()
    while len(lines) > 1 and _hidden(lines[-2], lines[-1], line):
        lines.pop()
    lines.append(line)


def _hidden(first: tuple[int, int, int], middle: tuple[int, int, int], last: tuple[int, int, int]) -> bool:
    """Whether ``middle`` is lowest nowhere beside lines of higher and lower slope."""
    return (last[1] - first[1]) * (first[0] - middle[0]) <= (middle[1] - first[1]) * (first[0] - last[0])
