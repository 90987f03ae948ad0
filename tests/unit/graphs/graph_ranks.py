"""Run by several processes: the graph that each rank chooses, step by step, for batches of its own. One JSON line each.

In the third part rank 2 has no room for a dummy, in the fourth it has lost the graph of one size.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch.distributed as dist

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.graphs.agreement import GraphAgreement, distributed_gather
from onebudget.graphs.base import CapturedGraph, Forward, GraphBackend
from onebudget.graphs.keys import GraphKey, Tier
from onebudget.graphs.padding import PaddingDummies
from onebudget.graphs.runner import CUDAGraphRunner

STEPS, BUCKETS, LENGTHS = 60, (1, 2, 4, 8), (64, 256)


class Nothing(CapturedGraph):
    outputs = ()

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass


class Platform(GraphBackend):
    def capture(self, forward: Forward, pool: Any | None) -> tuple[CapturedGraph, Any]:
        return Nothing(), pool or []

    def pool_bytes(self, pool: Any | None) -> int:
        return 0

    def release_pool(self, pool: Any) -> None:
        pass


class Dummies(PaddingDummies):
    def __init__(self, room: bool) -> None:
        super().__init__([])
        self._room = room

    def get(self, draft_len: int = 0) -> Request | None:
        return Request(-1, [1], SamplingParams(), max_new_tokens=1) if self._room else None


def runner(*, room: bool = True) -> CUDAGraphRunner:
    made = CUDAGraphRunner(
        Platform(),
        BUCKETS,
        max_batch_size=8,
        dummies=Dummies(room),
        tiers=(Tier.FULL, Tier.FAST),
        length_buckets=LENGTHS,
        agreement=GraphAgreement(distributed_gather()),
    )
    with made.allow_capture():
        for key in made.capture_keys():
            made.run(key, lambda: (), None)
    return made


def batch(rng: random.Random) -> ScheduledBatch:
    """Mostly generation; sometimes with a prompt, sampled, or empty."""
    made = ScheduledBatch()
    for number in range(rng.choice([0, *range(1, 10)])):
        params = SamplingParams(temperature=rng.choice([0.0, 0.0, 0.0, 1.0]))
        request = Request(number, [1, 2], params, max_new_tokens=4)
        request.state, request.output_token_ids, request.computed_tokens = RequestState.GENERATION, [3], 2
        made.generation.append(request)
    if rng.random() < 0.1:
        made.context_chunking.append(Request(99, [1, 2, 3], SamplingParams(), max_new_tokens=4))
    return made


def chosen(made: CUDAGraphRunner, rank: int, seed: int) -> list[Any]:
    rng, keys = random.Random(1000 * seed + rank), []
    for _ in range(STEPS):
        key = made.choose(batch(rng), rng.choice([10, 10, 10, 200]))
        keys.append(None if key is None else [key.batch_size, key.tier, key.length_bucket])
    return keys


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lost = runner()
    if rank == 2:
        lost.drop(GraphKey(8, tier=Tier.FULL, length_bucket=64))
    report = {
        "rank": rank,
        "first": chosen(runner(), rank, 1),
        "second": chosen(runner(), rank, 2),
        "no_dummy": chosen(runner(room=rank != 2), rank, 3),
        "lost": chosen(lost, rank, 4),
    }
    dist.barrier()
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
