"""What attention needs to know about one packed step: where tokens are written and what each part attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ContextSpan:
    """One prompt piece inside a packed step: rows ``start .. start+tokens`` attend to ``attended`` tokens that are
    still cached, themselves included."""

    start: int
    tokens: int
    attended: int
    prefix_blocks: torch.Tensor  # int64 [blocks of the tokens cached before this piece], first to last

    @property
    def prefix_tokens(self) -> int:
        return self.attended - self.tokens


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The generating part of a step: the last ``sequences`` rows of the pack.

    ``uniform``: every sequence attends to exactly ``padded_tokens``, so no mask is needed. ``captured``: the plan goes
    into a graph. Its tensors keep their addresses and change their values, so nothing may be concluded from lengths;
    ``padded_tokens`` and ``longest`` are what the tables have room for.
    """

    sequences: int
    padded_tokens: int
    longest: int
    lengths: torch.Tensor  # int [sequences]: attended tokens, the new one included
    blocks: torch.Tensor  # int [sequences * padded blocks]; unused entries repeat the first
    uniform: bool
    captured: bool = False


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One step for the layers of one KV group: its blocks are its own, and a windowed group has given back blocks
    that no coming token sees.

    Lengths and positions inside count from the first block that is still there, the same for all layers of the group.
    """

    slots: torch.Tensor  # int64 [tokens]: block * tokens_per_block + offset of each packed token
    contexts: list[ContextSpan]
    decode: DecodePlan | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One entry of ``groups`` per KV group, in the manager's order."""

    groups: tuple[GroupPlan, ...]
