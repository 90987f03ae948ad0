"""Random lives of requests over all ranks of a helix group, which decide as rank 0 does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebudget.core import Request, RequestState, ScheduledBatch
from onebudget.devtools.kv_lives import Lives, WrittenStore, text_up_to
from onebudget.errors import CapacityError
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.helix import HelixRank
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.v2 import KVCacheManagerV2

MOVES = ("start", "start", "step", "step", "step", "step", "cancel", "pause_one", "unpin")


class HelixCache:
    """The managers of a group as one. Whatever rank 0 has room for the others must have room for too."""

    def __init__(self, cp_size: int, blocks: int, size: int) -> None:
        self.ranks = [
            KVCacheManagerV2([KVGroup(WrittenStore(blocks, size), layers=[0])], helix=HelixRank(cp_size, rank))
            for rank in range(cp_size)
        ]
        self.groups = [rank.groups[0] for rank in self.ranks]
        self.tokens_per_block = size

    def prepare(self, batch: ScheduledBatch) -> None:
        self.ranks[0].prepare(batch)
        for rank in self.ranks[1:]:
            try:
                rank.prepare(batch)
            except CapacityError as error:
                raise AssertionError("rank 0 had room") from error

    def update(self, batch: ScheduledBatch) -> None:
        for rank in self.ranks:
            rank.update(batch)

    def free(self, request: Request, pin_on_release: bool = False) -> list[tuple[KVCacheManager, int]]:
        return [(rank, pin) for rank in self.ranks for pin in rank.free(request, pin_on_release)]

    def unpin(self, pin: tuple[KVCacheManager, int]) -> None:
        pin[0].unpin(pin[1])


class HelixLives(Lives):
    kv: Any

    def step(self) -> None:
        super().step()
        self.check_growth()

    def check_growth(self) -> None:
        """No rank has fewer free blocks than the first."""
        free = [rank.free_blocks for rank in self.kv.ranks]
        assert free[0] == min(free)

    def _places(self, request: Request, tokens: int) -> Sequence[tuple[int, int]]:
        """Rank and local position of each of the first ``tokens``, dealt out one after the other."""
        size, cp_size = self.kv.tokens_per_block, len(self.kv.ranks)
        dealt, places = [0] * cp_size, []
        for position in range(tokens):
            start = position if position < request.prompt_tokens else position - request.prompt_tokens
            rank = start // size % cp_size
            places.append((rank, dealt[rank]))
            dealt[rank] += 1
        return places

    def _compute(self, request: Request) -> None:
        size, tokens = self.kv.tokens_per_block, len(request.tokens_of_step())
        reached = request.computed_tokens + tokens
        for position, (rank, local) in enumerate(self._places(request, reached)):
            group = self.kv.groups[rank]
            block = group.store.blocks[group.block_table(request)[local // size]]
            if position < request.computed_tokens:
                assert block[local % size] == text_up_to(request, position), (request.id, position)
            else:
                block[local % size] = text_up_to(request, position)
        self.computed += tokens
        request.computed_tokens = reached
        if request.computed_tokens >= request.context_tokens:
            request.state = RequestState.GENERATION
            request.output_token_ids.append(self.random.randrange(self._vocabulary))


def run(lives: HelixLives, moves: Sequence[str]) -> None:
    for move in moves:
        getattr(lives, move)()
        lives.check()
    lives.finish()
    for group in lives.kv.groups:
        assert group.free_blocks == group.num_blocks
        assert group.used_blocks == 0


@settings(deadline=None)
@given(
    cp_size=st.integers(1, 4),
    blocks=st.integers(6, 24),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    moves=st.lists(st.sampled_from(MOVES), max_size=60),
)
def test_every_token_is_found_on_its_rank_and_the_pools_end_full(
    cp_size: int, blocks: int, size: int, seed: int, moves: list[str]
) -> None:
    cache = HelixCache(cp_size, blocks, size)
    run(HelixLives(cache, seed=seed, max_prompt=min(30, (blocks - 1) * size)), moves)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("cp_size", [2, 3])
def test_five_hundred_requests_end_with_full_pools(cp_size: int) -> None:
    lives = HelixLives(HelixCache(cp_size, 40, 4), seed=cp_size, max_prompt=60)  # type: ignore[arg-type]
    while lives.started < 500:
        move = lives.random.choice(MOVES) if len(lives.running) < 16 else lives.random.choice(MOVES[2:])
        getattr(lives, move)()
    run(lives, [])
