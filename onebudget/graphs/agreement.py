"""One graph for all ranks: with requests of their own, different graphs would mispair their collectives. No torch.

Two exchanges in every step, on every rank, whatever it has to run, each a row of the same few integers: first what
everybody pads to, then what everybody could run now. Any doubt means eager for all, never different graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from onebudget.errors import AgreementError
from onebudget.graphs.keys import Tier

Row = tuple[int, int, int, int]
Gather = Callable[[Row], Sequence[Sequence[int]]]
"""Collects one row from every rank, in rank order."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one rank could run: whether a graph is possible at all, the size its batch has or is padded to, its tier,
    and the most tokens that one of its requests attends to."""

    eligible: bool
    batch_size: int = 0
    tier: Tier = Tier.FULL
    longest: int = 0

    @property
    def row(self) -> Row:
        eligible, size, tier, longest = astuple(self)
        return int(eligible), int(size), int(tier), int(longest)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Candidate:
        eligible, size, tier, longest = row
        return cls(bool(eligible), size, Tier(tier), longest)


NO_GRAPH = Candidate(False)


def common_size(candidates: Sequence[Candidate]) -> Candidate:
    """What all pad to: the largest size and length. Nothing where a rank can run no graph, because then none will."""
    if not all(candidate.eligible for candidate in candidates):
        return NO_GRAPH
    sizes, lengths = [c.batch_size for c in candidates], [c.longest for c in candidates]
    return Candidate(True, max(sizes), longest=max(lengths))


def decide(candidates: Sequence[Candidate]) -> Candidate:
    """What all run: eager unless every rank is ready for a graph of one size; unlike tiers become ``FULL``."""
    first = candidates[0]
    if not all(c.eligible and c.batch_size == first.batch_size and c.longest == first.longest for c in candidates):
        return NO_GRAPH
    return first if all(c.tier is first.tier for c in candidates) else replace(first, tier=Tier.FULL)


class GraphAgreement:
    """The two exchanges, over a ``gather`` that all ranks call in the same order."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def common_size(self, mine: Candidate) -> Candidate:
        """The first exchange of a step."""
        return common_size(self._all(mine))

    def decide(self, mine: Candidate) -> Candidate:
        """The second exchange of a step."""
        return decide(self._all(mine))

    def _all(self, mine: Candidate) -> list[Candidate]:
        rows = self._gather(mine.row)
        if not rows or any(len(row) != len(mine.row) for row in rows):
            raise AgreementError(f"ranks exchanged {[list(row) for row in rows]} in place of one candidate each")
        return [Candidate.from_row(row) for row in rows]


def distributed_gather(group: Any = None) -> Gather:
    """A ``gather`` over ``torch.distributed``: 32 bytes from every rank of ``group``, the default one when None."""
    import torch
    import torch.distributed as dist

    def gather(row: Row) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, mine, group=group)
        return [gathered.tolist() for gathered in rows]

    return gather
