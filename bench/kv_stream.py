"""The requests that every contender of ``kv_manager.py`` serves, as token ids, and how a round of them is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_TOKENS = 16
Round = Callable[[], tuple[float, int]]
"""One timed round: its seconds, set-up left out, and the operations in them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Prompts of 1,024 tokens, but ``running``, which have 500 and are extended ``decode_steps`` times.

    ``shared`` start with the same 1,008 tokens, the first of them is there before the round begins. ``half_shared``
    start with one of twenty beginnings of 512. ``leaves`` share nothing.
    """

    unique: list[list[int]]
    shared: list[list[int]]
    half_shared: list[list[int]]
    leaves: list[list[int]]
    running: list[list[int]]
    decode_steps: int = 16


def make_stream(requests: int = 200) -> Stream:
    beginning = list(range(1008))
    return Stream(
        unique=[unique_prompt(number) for number in range(requests)],
        shared=[beginning + [9_000 + number] * 16 for number in range(requests + 1)],
        half_shared=[
            list(range(number % 20 * 1_000, number % 20 * 1_000 + 512)) + unique_prompt(number, 512, start=10**6)
            for number in range(requests)
        ],
        leaves=[unique_prompt(number) for number in range(1_000)],
        running=[unique_prompt(number, 500) for number in range(256)],
    )


def unique_prompt(number: int, tokens: int = 1024, *, start: int = 0) -> list[int]:
    first = start + number * tokens
    return list(range(first, first + tokens))


def timed(run: Callable[[], object], operations: int) -> tuple[float, int]:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started, operations
