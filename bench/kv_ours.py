"""Our KV bookkeeping, as rounds that ``kv_manager.py`` times: the same rows as the peers', and the same work at sizes
from a thousand to a million blocks."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from kv_stream import BLOCK_TOKENS, Round, Stream, timed, unique_prompt

from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.resources.kv.blocks import BlockPool
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.node import token_bytes
from onebudget.resources.kv.store import CountedStore

PARAMS = SamplingParams(max_tokens=16)
SCALES = (10**3, 10**4, 10**5, 10**6)
OPERATIONS = 500


def our_rounds(stream: Stream, num_blocks: int) -> dict[str, Round]:
    """Rounds by row name."""
    return OurRounds(stream, num_blocks).rounds()


class OurRounds:
    def __init__(self, stream: Stream, num_blocks: int) -> None:
        self.stream, self.num_blocks = stream, num_blocks

    def manager(self, *, reuse: bool) -> KVCacheManager:
        return KVCacheManager(CountedStore(self.num_blocks, BLOCK_TOKENS), reuse=reuse, partial_reuse=False)

    def pool(self, num_blocks: int | None = None) -> BlockPool:
        return BlockPool(CountedStore(num_blocks or self.num_blocks, BLOCK_TOKENS))

    def requests(self, prompts: Sequence[list[int]]) -> list[Request]:
        return [Request(number, prompt, PARAMS, 16) for number, prompt in enumerate(prompts)]

    def keyed(self, manager: KVCacheManager, prompts: Sequence[list[int]]) -> list[Request]:
        """Requests whose keys exist already, as the peer's hashes do."""
        requests = self.requests(prompts)
        for request in requests:
            manager.reusable_tokens(request)
        return requests

    def serve(self, manager: KVCacheManager, requests: Sequence[Request]) -> None:
        for request in requests:
            request.computed_tokens = manager.begin(request)
            assert manager.resize(request, request.prompt_tokens)
            request.computed_tokens = request.prompt_tokens
            manager.free(request)

    def allocate_free(self) -> tuple[float, int]:
        manager, requests = self.manager(reuse=False), self.requests(self.stream.unique)
        return timed(lambda: self.serve(manager, requests), len(requests))

    def allocate_free_unique(self) -> tuple[float, int]:
        manager = self.manager(reuse=True)
        requests = self.keyed(manager, self.stream.unique)
        return timed(lambda: self.serve(manager, requests), len(requests))

    def from_token_ids(self) -> tuple[float, int]:
        manager, prompts = self.manager(reuse=True), self.stream.unique
        return timed(lambda: self.serve(manager, self.requests(prompts)), len(prompts))

    def warm(self) -> tuple[KVCacheManager, list[Request]]:
        manager = self.manager(reuse=True)
        requests = self.keyed(manager, self.stream.shared)
        self.serve(manager, requests[:1])
        return manager, requests[1:]

    def lookup(self) -> tuple[float, int]:
        manager, requests = self.warm()

        def run() -> None:
            for request in requests:
                manager.reusable_tokens(request)

        return timed(run, len(requests))

    def serve_hits(self) -> tuple[float, int]:
        manager, requests = self.warm()
        return timed(lambda: self.serve(manager, requests), len(requests))

    def decode(self) -> tuple[float, int]:
        return decode_round(self.manager(reuse=False), self.requests(self.stream.running), self.stream.decode_steps)

    def blocks(self) -> tuple[float, int]:
        return blocks_round(self.pool())

    def construct(self) -> tuple[float, int]:
        return timed(lambda: self.manager(reuse=True), 1)

    def keys(self, prompts: Sequence[list[int]]) -> list[bytes]:
        return [token_bytes(prompt) for prompt in prompts]

    def insert_all(self, pool: BlockPool, keys: Sequence[bytes], tables: Sequence[list[int]]) -> None:
        root = pool.tree.root()
        for key, table in zip(keys, tables, strict=True):
            pool.hold(root)
            pool.release(pool.insert(root, key, 0, table, len(table)))

    def taken(self, pool: BlockPool, keys: Sequence[bytes]) -> list[list[int]]:
        """Blocks for texts; the peer's values are there before the round begins too."""
        return [pool.take(len(key) // pool.tree.block_bytes) for key in keys]

    def insert(self) -> tuple[float, int]:
        pool, keys = self.pool(), self.keys(self.stream.unique)
        tables = self.taken(pool, keys)
        return timed(lambda: self.insert_all(pool, keys, tables), len(keys))

    def match(self) -> tuple[float, int]:
        pool, keys = self.pool(), self.keys(self.stream.shared)
        self.insert_all(pool, keys[:1], self.taken(pool, keys[:1]))
        tree = pool.tree

        def run() -> None:
            for key in keys[1:]:
                tree.match(tree.root(), key, len(key))

        return timed(run, len(keys) - 1)

    def match_insert(self) -> tuple[float, int]:
        pool, keys = self.pool(), self.keys(self.stream.half_shared)
        tables = self.taken(pool, keys)
        tree = pool.tree

        def run() -> None:
            for key, table in zip(keys, tables, strict=True):
                tree.match(tree.root(), key, len(key))
                self.insert_all(pool, [key], [table])

        return timed(run, len(keys))

    def evict(self) -> tuple[float, int]:
        keys = self.keys(self.stream.leaves)
        pool = self.pool(64 * len(keys))
        self.insert_all(pool, keys, self.taken(pool, keys))
        return evict_round(pool, len(keys) // 2)

    def rounds(self) -> dict[str, Round]:
        return {
            "allocate + free, reuse off": self.allocate_free,
            "allocate + store + free, unique prompts": self.allocate_free_unique,
            "the same from token ids, keys included": self.from_token_ids,
            "lookup, 63 blocks hit": self.lookup,
            "lookup + allocate + free on a hit": self.serve_hits,
            "extend by one token, 256 running": self.decode,
            "take + give back 64 blocks": self.blocks,
            "construct the manager": self.construct,
            "tree: insert 64 new blocks": self.insert,
            "tree: match 63 blocks": self.match,
            "tree: match + insert, half shared": self.match_insert,
            "tree: evict 64 blocks, 1,000 leaves": self.evict,
        }


def decode_round(manager: KVCacheManager, requests: Sequence[Request], steps: int) -> tuple[float, int]:
    for request in requests:
        manager.begin(request)
        manager.resize(request, request.prompt_tokens)
        request.computed_tokens, request.state = request.prompt_tokens, RequestState.GENERATION
    batch = ScheduledBatch(generation=list(requests))

    def run() -> None:
        for _ in range(steps):
            manager.prepare(batch)
            for request in batch.generation:
                request.output_token_ids.append(7)
                request.computed_tokens += 1

    return timed(run, steps * len(requests))


def blocks_round(pool: BlockPool) -> tuple[float, int]:
    def run() -> None:
        for _ in range(1000):
            pool.give_back(pool.take(64))

    return timed(run, 1000)


def evict_round(pool: BlockPool, times: int) -> tuple[float, int]:
    def run() -> None:
        for _ in range(times):
            pool.evict(64)

    return timed(run, times)


class Scaled:
    """A pool of ``num_blocks``, nine tenths of them full of prefixes of 16 blocks that nobody holds, longest unused
    first in ``texts``."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = KVCacheManager(CountedStore(num_blocks, BLOCK_TOKENS), reuse=True, partial_reuse=False)
        self.pool = self.manager.groups[0].blocks
        self.texts: deque[bytes] = deque()
        self._made = 0
        for _ in range(num_blocks * 9 // 10 // 16):
            self._insert(self._new_text())

    def _new_text(self) -> bytes:
        self._made += 1
        return token_bytes(unique_prompt(self._made, 16 * BLOCK_TOKENS))

    def _insert(self, key: bytes) -> None:
        root = self.pool.tree.root()
        self.pool.hold(root)
        self.pool.release(self.pool.insert(root, key, 0, self.pool.take(16), 16))
        self.texts.append(key)

    def lookup(self) -> Callable[[], int]:
        """Prompts that begin with texts from all over the pool."""
        manager = self.manager
        requests = [
            Request(number, [*array("i", text), 0], PARAMS, 16)
            for number, text in enumerate(random.Random(0).choices(self.texts, k=OPERATIONS))
        ]
        assert all(manager.reusable_tokens(request) == 16 * BLOCK_TOKENS for request in requests)  # makes the keys

        def run() -> int:
            for request in requests:
                manager.reusable_tokens(request)
            return OPERATIONS

        return run

    def insert_evict(self) -> Callable[[], int]:
        """Each new text takes the place of the one unused for longest."""
        fresh = [self._new_text() for _ in range(OPERATIONS)]

        def run() -> int:
            for key in fresh:
                self.pool.evict(16)
                self.texts.popleft()
                self._insert(key)
            return OPERATIONS

        return run

    def take(self) -> Callable[[], int]:
        def run() -> int:
            for _ in range(OPERATIONS):
                self.pool.give_back(self.pool.take(4))
            return OPERATIONS

        return run

    def operations(self) -> dict[str, Callable[[], Callable[[], int]]]:
        return {
            "take + give back 4 blocks": self.take,
            "lookup, 16 blocks hit": self.lookup,
            "insert 16 blocks, evict 16": self.insert_evict,
        }

    @property
    def work(self) -> int:
        """Nodes looked at and moves in the order of eviction so far."""
        return self.pool.tree.visited + self.pool.order.moves
