"""What is taken out of a step after admission, in this order: balance between ranks, waiting for fuller batches, state
slots of recurrent layers, and the cap on attended tokens. Requests taken out keep their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from onebudget.budget.context_workspace import keep_prefix_within_cap

if TYPE_CHECKING:
    from onebudget.scheduling.cache import SchedulableCache
    from onebudget.scheduling.pieces import Piece


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What else the step computes."""

    generation: int
    generation_tokens: int


class PostFilter(Protocol):
    def __call__(self, pieces: list[Piece], load: StepLoad) -> list[Piece]:
        """The pieces that stay, in order."""
        ...


class BatchWait:
    """Hold contexts back while the step is far from full, so that they share a larger one later.

    For at most ``iterations`` steps in a row, while there are fewer than ``ratio * max_num_tokens`` tokens; never with
    nothing to generate, because then nothing would run at all.
    """

    def __init__(self, iterations: int, ratio: float, max_num_tokens: int) -> None:
        self._iterations = iterations
        self._enough_tokens = ratio * max_num_tokens
        self._waited = 0

    def __call__(self, pieces: list[Piece], load: StepLoad) -> list[Piece]:
        tokens = load.generation_tokens + sum(piece.tokens for piece in pieces)
        if not pieces or not load.generation or tokens >= self._enough_tokens or self._waited >= self._iterations:
            self._waited = 0
            return pieces
        self._waited += 1
        return []


class RecurrentCapacity:
    """First chunks need a state slot each; ``free_states`` says how many there are."""

    def __init__(self, free_states: Callable[[], int]) -> None:
        self._free_states = free_states

    def __call__(self, pieces: list[Piece], load: StepLoad) -> list[Piece]:
        left, kept = self._free_states(), []
        for piece in pieces:
            if not piece.request.begun:
                left -= 1
                if left < 0:
                    break
            kept.append(piece)
        return kept


class AttendedCap:
    """Contexts of one step attend to no more than the context workspace covers; the first always runs.

    Dummies know no cap: what they attend to is what the profile saw.
    """

    def __init__(self, kv: SchedulableCache) -> None:
        self._kv = kv
        self.deferred = 0

    def __call__(self, pieces: list[Piece], load: StepLoad) -> list[Piece]:
        cap = self._kv.attended_tokens_cap
        if cap is None or len(pieces) < 2 or any(piece.request.is_dummy for piece in pieces):
            return pieces
        admitted = keep_prefix_within_cap([piece.attended for piece in pieces], cap)
        self.deferred += len(pieces) - admitted
        return pieces[:admitted]


class ContextBalance:
    """Under attention data parallelism: hold contexts back until ``share`` of the ranks have some, for at most
    ``iterations`` steps, because one rank with a context makes all others wait for it.

    ``gather`` collects a number from every rank; it is called in every step, whatever this rank has.
    """

    def __init__(self, gather: Callable[[int], Sequence[int]], *, iterations: int, share: float = 1.0) -> None:
        self._gather = gather
        self._iterations = iterations
        self._share = share
        self._waited = 0

    def __call__(self, pieces: list[Piece], load: StepLoad) -> list[Piece]:
        every = self._gather((len(pieces) > 0) + 2 * (load.generation == 0))
        ready = sum(value & 1 for value in every)
        idle = any(value & 2 for value in every)  # a rank without generation would have nothing at all to do
        if ready == 0 or ready >= self._share * len(every) or idle or self._waited >= self._iterations:
            self._waited = 0
            return pieces
        self._waited += 1
        return []
