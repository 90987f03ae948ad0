"""From logits to one token per sequence."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onebudget.core import Request

_MINUS_INFINITY = float("-inf")


class Sampler:
    """Greedy rows by argmax; random rows by inverting the cumulative distribution at one uniform number each.

    The uniform numbers come from the request's own generator, so a seed gives the same tokens in any batch.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seeds = random.Random(seed)
        self._generators: dict[int, random.Random] = {}

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """One token id per row of ``logits`` ``[len(requests), vocab]``, which may be overwritten."""
        self._bar_end_tokens(logits, requests)
        tokens = torch.argmax(logits, dim=-1)
        rows = [row for row, request in enumerate(requests) if not request.params.greedy]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = self._draw(logits[index].float(), [requests[row] for row in rows])
        if tokens.is_meta:
            return [0] * len(requests)
        return tokens.tolist()

    def forget(self, request: Request) -> None:
        self._generators.pop(request.id, None)

    def _bar_end_tokens(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        for row, request in enumerate(requests):
            if len(request.output_token_ids) < request.params.min_tokens and request.end_token_ids:
                logits[row, sorted(request.end_token_ids)] = _MINUS_INFINITY

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """``logits`` float32 ``[rows, vocab]`` of the random rows only; consumed."""
        logits /= _column([request.params.temperature for request in requests], logits)
        uniform = _column([self._uniform(request) for request in requests], logits)
        if all(request.params.top_k == 0 and request.params.top_p == 1 for request in requests):
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
            generator = random.Random(self._seeds.getrandbits(64) if seed is None else seed)
            self._generators[request.id] = generator
        return generator.random()


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
