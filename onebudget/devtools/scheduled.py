"""A scheduler over counted blocks without an executor, and what a plain step does to its batches."""

from __future__ import annotations

from typing import Any

from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.store import CountedStore
from onebudget.scheduling import Scheduler

BLOCK = 32


def config_of(**knobs: Any) -> BudgetConfig:
    return BudgetConfig(**{"max_seq_len": 1024, "max_num_tokens": 4096, "tokens_per_block": BLOCK, **knobs})


def scheduler_of(blocks: int, *, options: dict[str, Any] | None = None, **knobs: Any) -> Scheduler:
    config = config_of(**knobs)
    kv = KVCacheManager(CountedStore(blocks, config.tokens_per_block), reuse=config.enable_block_reuse)
    return Scheduler(config, kv, **(options or {}))


def cache_of(scheduler: Scheduler) -> KVCacheManager:
    kv = scheduler._kv
    assert isinstance(kv, KVCacheManager)
    return kv


def request_of(number: int, prompt: int, new: int, *, first: int | None = None) -> Request:
    """A prompt that nobody shares, unless ``first`` says which token it consists of."""
    tokens = [1000 + number if first is None else first] * prompt
    return Request(number, tokens, SamplingParams(), max_new_tokens=new)


def ids(requests: list[Request]) -> list[int]:
    return [one.id for one in requests]


def carry_out(scheduler: Scheduler, batch: ScheduledBatch) -> list[Request]:
    """One plain step around a batch; returns who ended."""
    kv = cache_of(scheduler)
    for one in batch.paused:
        scheduler.settle_paused(one)
    scheduler.begin(batch)
    kv.prepare(batch)
    for one in batch.context:
        one.computed_tokens += one.chunk_tokens
    for one in batch.generation:
        one.computed_tokens += 1
    ended = []
    for one in batch.sampled:
        one.state = RequestState.GENERATION
        one.output_token_ids.append(5)
        if len(one.output_token_ids) >= one.max_new_tokens:
            one.finish("length")
            scheduler.remove(one)
            kv.free(one)
            ended.append(one)
    kv.update(batch)
    return ended


def drain(scheduler: Scheduler, limit: int = 20_000) -> list[Request]:
    ended = []
    while scheduler.has_work:
        ended += carry_out(scheduler, scheduler.schedule())
        limit -= 1
        assert limit, "the loop does not end"
    return ended
