"""From logits to one token per sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from onebudget.engine import logprobs, penalties
from onebudget.engine.logprobs import LogprobRows, log_probabilities
from onebudget.engine.sampled import HostCopy, SampledTokens
from onebudget.errors import AllocationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onebudget.buffers import Buffer
    from onebudget.core import Request, ScheduledBatch
    from onebudget.engine.penalties import PenaltyStore

ROWS_AT_ONCE = 32
"""Rows whose float32 copies, sorted values and probabilities exist at the same time, however large the batch is."""

_MINUS_INFINITY = float("-inf")
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


class Sampler:
    """Penalties, then barred tokens, then temperature, then the choice.

    Greedy rows by argmax; random rows by inverting the cumulative distribution at one uniform number each. The uniform
    numbers come from the request's own generator and every row is treated by itself, so a seed gives the same tokens in
    any batch. Without a ``store`` no penalised request may arrive.
    """

    def __init__(self, seed: int | None = None, store: PenaltyStore | None = None) -> None:
        self._seed = random.Random(seed).getrandbits(64)
        self._generators: dict[int, random.Random] = {}
        self._store = store

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """One token id per row of ``logits`` ``[len(requests), vocab]``; requests that ask for log-probabilities get
        them."""
        return self.launch(logits, requests).read()

    def launch(
        self, logits: torch.Tensor, requests: Sequence[Request], *, into: torch.Tensor | None = None
    ) -> SampledTokens:
        """``sample`` without waiting for the tokens, which are written to ``into`` on the device as well. Requests get
        their log-probabilities when the tokens are read, before they are appended.

        ``AllocationError`` of owner ``penalty_workspace``, with nothing changed, where penalties find no room.
        """
        if self._store is not None:
            self._store.begin(requests, logits.shape[-1])
        tokens = torch.argmax(logits, dim=-1)
        for rows in _alike(requests):
            chosen = [requests[row] for row in rows]
            index = torch.tensor(rows, device=logits.device)
            if chosen[0].params.greedy:
                tokens[index] = torch.argmax(self._prepared(logits, index, chosen), dim=-1)
            else:
                tokens[index] = self._draw(self._prepared(logits, index, chosen), chosen)
        if into is not None:
            into[: len(requests)].copy_(tokens)
        return SampledTokens(HostCopy(tokens), self._logprobs(logits, tokens, requests))

    def blamed(self, batch: ScheduledBatch, error: Exception) -> list[Request]:
        """Requests that a failed step ends: those that wanted what found no room, before anything was sampled for the
        others; else all."""
        owner = error.owner if isinstance(error, AllocationError) else None
        if owner == penalties.OWNER:
            return [request for request in [*batch.context_last, *batch.generation] if request.params.penalised]
        if owner == logprobs.OWNER:
            return [request for request in batch.context if request.params.prompt_logprobs is not None]
        return batch.requests

    def forget(self, request: Request) -> None:
        self._generators.pop(request.id, None)
        if self._store is not None:
            self._store.forget(request)

    def vacate(self, request: Request) -> None:
        """The request leaves its slot for a while; its random numbers go on where they stopped."""
        if self._store is not None:
            self._store.forget(request)

    @property
    def buffers(self) -> list[Buffer]:
        return [] if self._store is None else self._store.buffers

    @property
    def table_bytes(self) -> int:
        return 0 if self._store is None else self._store.table_bytes

    def rebuild(self) -> None:
        """New memory after the old was lost."""
        if self._store is not None:
            self._store.release()
            self._store.allocate()

    def release(self) -> None:
        if self._store is not None:
            self._store.release()

    def _prepared(self, logits: torch.Tensor, index: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """A float32 copy of the rows, penalised and without barred tokens."""
        rows = logits[index].float()
        if self._store is not None:
            self._store.apply(rows, requests)
        for row, request in zip(rows, requests, strict=True):
            if _is_barred(request):
                inside = [token for token in sorted(request.end_token_ids) if token < rows.shape[-1]]
                row[inside] = _MINUS_INFINITY
        return rows

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """``logits`` float32 ``[rows, vocab]`` of rows that all filter or all don't; consumed."""
        # With the largest logit at 0, no temperature makes one overflow.
        logits -= logits.amax(-1, keepdim=True)
        logits /= _column([request.params.temperature for request in requests], logits).clamp_(_SMALLEST_TEMPERATURE)
        uniform = _column([self._uniform(request) for request in requests], logits)
        if not _filters(requests[0]):
            return _invert(torch.softmax(logits, -1), uniform)
        logits, order = torch.sort(logits, dim=-1, descending=True)
        self._keep_top_k(logits, requests)
        probabilities = torch.softmax(logits, -1)
        top_p = _column([request.params.top_p for request in requests], logits)
        before = probabilities.cumsum(-1).sub_(probabilities)
        probabilities.masked_fill_(before >= top_p, 0.0)
        return order.gather(-1, _invert(probabilities, uniform)[:, None]).squeeze(-1)

    @staticmethod
    def _keep_top_k(sorted_logits: torch.Tensor, requests: Sequence[Request]) -> None:
        for row, request in enumerate(requests):
            if 0 < request.params.top_k < sorted_logits.shape[-1]:
                sorted_logits[row, request.params.top_k :] = _MINUS_INFINITY

    def _uniform(self, request: Request) -> float:
        generator = self._generators.get(request.id)
        if generator is None:
            seed = request.params.seed
            # By number, not by turn: who samples first depends on who found what in the cache.
            generator = random.Random(f"{self._seed}/{request.id}" if seed is None else seed)
            self._generators[request.id] = generator
        return generator.random()

    @staticmethod
    def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]) -> list[Callable[[], None]]:
        """Of the model's own logits: penalties and barred tokens only touched copies."""
        notes: list[Callable[[], None]] = []
        wanted = [(row, r.params.logprobs) for row, r in enumerate(requests) if r.params.logprobs is not None]
        for start in range(0, len(wanted), ROWS_AT_ONCE):
            rows, top = zip(*wanted[start : start + ROWS_AT_ONCE], strict=True)
            index = torch.tensor(rows, device=logits.device)
            found = LogprobRows(log_probabilities(logits[index]), tokens[index], top)
            if not logits.is_meta:
                notes.append(partial(_note, [requests[row] for row in rows], found))
        return notes


def _note(requests: Sequence[Request], found: LogprobRows) -> None:
    for request, logprob in zip(requests, found.read(), strict=True):
        del request.logprobs[len(request.output_token_ids) :]
        request.logprobs.append(logprob)


def _alike(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Rows that need a copy of their own, grouped by how they are chosen, ``ROWS_AT_ONCE`` at most."""
    groups: dict[str, list[int]] = {"greedy": [], "plain": [], "filtered": []}
    for row, request in enumerate(requests):
        if not request.params.greedy:
            groups["filtered" if _filters(request) else "plain"].append(row)
        elif request.params.penalised or _is_barred(request):
            groups["greedy"].append(row)
    for rows in groups.values():
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield rows[start : start + ROWS_AT_ONCE]


def _filters(request: Request) -> bool:
    return request.params.top_k != 0 or request.params.top_p != 1


def _is_barred(request: Request) -> bool:
    """Whether its end tokens may not come yet."""
    return len(request.output_token_ids) < request.params.min_tokens and bool(request.end_token_ids)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows, 1]`` beside ``like``."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index drawn from unnormalised ``weights`` ``[rows, n]`` at ``uniform`` ``[rows, 1]`` in [0, 1)."""
    cumulative = weights.cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(-1)
    # Rounding can push the draw past the last index that has weight.
    last = weights.shape[-1] - 1 - torch.argmax((weights.flip(-1) > 0).to(torch.uint8), dim=-1)
    return torch.minimum(drawn, last)
