"""Which rank computes which request of a call, and how all of them learn the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onebudget.core import Request, RequestOutput

if TYPE_CHECKING:
    from onebudget.engine.ranks import RankGroup
    from onebudget.engine.session import Session


class EveryRank:
    """One process alone, or ranks that compute the same requests: each of them sees all there is."""

    def own(self, sessions: list[Session]) -> list[Session]:
        """Those of one call's ``sessions`` that this rank computes."""
        return sessions

    def unfinished(self, own: Iterable[Session]) -> bool:
        """Whether any rank has requests of this call left. Called by all ranks."""
        return not all(session.request.finished for session in own)

    def outputs(self, sessions: Iterable[Session], own: Iterable[Session]) -> list[RequestOutput]:
        """Results of all ``sessions``, in their order. Called by all ranks."""
        return [RequestOutput.of(session.request) for session in sessions]


class Dealt(EveryRank):
    """Ranks with requests of their own: each request goes to one rank, and its result to all."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def own(self, sessions: list[Session]) -> list[Session]:
        admitted = [session for session in sessions if not session.request.finished]
        places = deal([session.request for session in admitted], self._ranks.size)
        return [session for session, rank in zip(admitted, places, strict=True) if rank == self._ranks.rank]

    def unfinished(self, own: Iterable[Session]) -> bool:
        return any(self._ranks.gather(super().unfinished(own)))

    def outputs(self, sessions: Iterable[Session], own: Iterable[Session]) -> list[RequestOutput]:
        every = self._ranks.gather([RequestOutput.of(session.request) for session in own])
        found = {output.request_id: output for outputs in every for output in outputs}
        return [
            found[session.request.id] if session.request.id in found else RequestOutput.of(session.request)
            for session in sessions
        ]


def deal(requests: Sequence[Request], ranks: int) -> list[int]:
    """A rank for each request: in turn, the one with the fewest tokens so far, the first among equals."""
    tokens = [0] * ranks
    places = []
    for request in requests:
        rank = tokens.index(min(tokens))
        tokens[rank] += request.prompt_tokens + request.max_new_tokens
        places.append(rank)
    return places
