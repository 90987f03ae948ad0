"""Traces out of a seed, with the columns of recorded ones: conversations whose turns share all that was said before."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from random import Random

from onebudget.errors import ConfigError
from onebudget.planner.simulate.traces import PREFIX_BLOCK_TOKENS, Trace, TraceRequest
from onebudget.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """What a synthetic trace is drawn from.

    Requests come as a Poisson stream of ``requests_per_s``. Each opens a conversation, which starts with one of
    ``system_prompts`` texts of ``system_tokens``, or with probability ``continues`` takes up an earlier one again: its
    prompt, then ``turn_tokens`` more on average. Lengths of turns and answers are exponential.
    """

    requests: int = 1000
    requests_per_s: float = 2.0
    system_prompts: int = 4
    system_tokens: int = 2 * PREFIX_BLOCK_TOKENS
    continues: float = 0.6
    turn_tokens: int = 1500
    output_tokens: int = 250
    longest_tokens: int = 32_768


def synthetic_trace(seed: int = 0, load: SyntheticLoad | None = None) -> Trace:
    """The same seed and load give the same trace."""
    load = load or SyntheticLoad()
    _check(load)
    draw = _Draw(Random(seed), load)
    return Trace(f"synthetic-{seed}", tuple(draw.request() for _ in range(load.requests)))


def _check(load: SyntheticLoad) -> None:
    for name in ("requests", "system_prompts", "turn_tokens", "output_tokens"):
        if getattr(load, name) < 1:
            raise ConfigError.for_field(name, getattr(load, name), "at least 1")
    if not load.requests_per_s > 0:
        raise ConfigError.for_field("requests_per_s", load.requests_per_s, "a number above 0")
    if not 0 <= load.continues <= 1:
        raise ConfigError.for_field("continues", load.continues, "a probability from 0 to 1")


class _Draw:
    """Conversations that may go on, and the ids handed out so far."""

    def __init__(self, random: Random, load: SyntheticLoad) -> None:
        self._random = random
        self._load = load
        self._now = 0.0
        self._next_id = 0
        whole = load.system_tokens // PREFIX_BLOCK_TOKENS
        self._systems = [self._new_ids(whole) for _ in range(load.system_prompts)]
        self._open: list[tuple[float, tuple[int, ...]]] = []

    def request(self) -> TraceRequest:
        arrival, load = round(self._now, 3), self._load
        self._now += self._random.expovariate(load.requests_per_s)
        prefix = self._prefix()
        turn = 1 + int(self._random.expovariate(1 / load.turn_tokens))
        prompt = min(len(prefix) * PREFIX_BLOCK_TOKENS + turn, load.longest_tokens)
        output = 1 + int(self._random.expovariate(1 / load.output_tokens))
        blocks = ceil_div(prompt, PREFIX_BLOCK_TOKENS)
        ids = prefix[:blocks] + self._new_ids(blocks - len(prefix))
        if prompt < load.longest_tokens:
            whole = ids[: prompt // PREFIX_BLOCK_TOKENS]
            heapq.heappush(self._open, (self._random.random(), whole))
        return TraceRequest(arrival, prompt, output, ids)

    def _prefix(self) -> tuple[int, ...]:
        """What the prompt shares with those before it, in whole blocks."""
        if self._open and self._random.random() < self._load.continues:
            return heapq.heappop(self._open)[1]
        return self._random.choice(self._systems)

    def _new_ids(self, count: int) -> tuple[int, ...]:
        first, self._next_id = self._next_id, self._next_id + max(0, count)
        return tuple(range(first, self._next_id))
