"""Which batches run through a graph, and the life of those graphs: warm up, capture, replay, destroy."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onebudget.errors import AllocationError, ConfigError, StateError, UnknownKeyError
from onebudget.graphs.agreement import NO_GRAPH, Candidate
from onebudget.graphs.keys import GraphKey, GraphState, Tier, capture_order
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.graphs.agreement import GraphAgreement
    from onebudget.graphs.base import CapturedGraph, Forward, GraphBackend, Outputs
    from onebudget.graphs.padding import PaddingDummies

logger = logging.getLogger(__name__)


class CUDAGraphRunner:
    """Captures decode forwards for the chosen batch sizes and replays them; all its graphs share one pool.

    ``buckets``: captured batch sizes. ``length_buckets``: attended lengths that graphs are laid out for; ``(0,)`` where
    attention reads lengths itself. ``dummies`` pad batches; None: no padding. ``agreement``: for ranks with requests of
    their own, which all run the same graph or none. Any doubt means eager, never another graph.
    """

    def __init__(
        self,
        backend: GraphBackend,
        buckets: Sequence[int],
        *,
        max_batch_size: int,
        dummies: PaddingDummies | None = None,
        enabled: bool = True,
        beam_width: int = 1,
        draft_lens: Sequence[int] = (0,),
        tiers: Sequence[Tier] = (Tier.FULL,),
        length_buckets: Sequence[int] = (0,),
        agreement: GraphAgreement | None = None,
    ) -> None:
        if any(bucket < 1 for bucket in buckets):
            raise ConfigError.for_field("cuda_graph_batch_sizes", list(buckets), "sizes of at least 1")
        self.enabled = enabled and bool(buckets)
        self.buckets = tuple(sorted(set(buckets)))
        self.dummies = dummies
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self.outputs: dict[GraphKey, tuple[weakref.ref[Any], ...]] = {}
        self.metadata: dict[GraphKey, object] = {}
        self.memory_pool: Any | None = None
        self.capture_allowed = False
        self.warmup_only = False
        self.misses = 0
        self._backend = backend
        self._max_batch_size = max_batch_size
        self._beam_width = beam_width
        self._draft_lens = tuple(draft_lens)
        self._tiers = tuple(tiers)
        self._length_buckets = tuple(sorted(length_buckets))
        self._agreement = agreement
        self._states: dict[GraphKey, GraphState] = {}
        self._cleared = False

    # -- choosing ---------------------------------------------------------------------------------------------

    @property
    def padding(self) -> bool:
        return self.dummies is not None

    @property
    def max_bucket(self) -> int:
        return self.buckets[-1] if self.buckets else 0

    def capture_keys(self) -> list[GraphKey]:
        """Every key to capture, in capture order."""
        return capture_order(
            {
                GraphKey(size, draft, tier=tier, length_bucket=length)
                for size in self.buckets
                for draft in self._draft_lens
                for tier in self._tiers
                for length in self._length_buckets
            }
        )

    def eligible(self, batch: ScheduledBatch) -> bool:
        """Whether every request computes one token at the end of its sequence: it generates, or is the rest of a prompt
        of which everything else stands in the cache."""
        if not self.enabled or not batch.size or batch.context_chunking or batch.encoder:
            return False
        return all(map(self._promotable, batch.context_last)) and not any(r.draft_tokens for r in batch.generation)

    def _promotable(self, request: Request) -> bool:
        return self._beam_width == 1 and request.step_tokens == 1 and request.params.prompt_logprobs is None

    def padded_size(self, live: int, draft_len: int = 0) -> int:
        """The captured size that ``live`` requests are padded to; ``live`` itself where there is none."""
        at = bisect_left(self.buckets, live)
        if not self.enabled or self.dummies is None or at == len(self.buckets):
            return live
        padded = self.buckets[at]
        return self._padded_to(padded, live, draft_len)

    def _padded_to(self, size: int, live: int, draft_len: int = 0) -> int:
        """``size`` where ``live`` requests can be padded to it, else ``live``."""
        if size == live or size not in self.buckets or size > self._max_batch_size:
            return live
        return live if self.dummies is None or self.dummies.get(draft_len) is None else size

    def choose(self, batch: ScheduledBatch, longest: int = 0) -> GraphKey | None:
        """The graph to run ``batch`` through, padded to its size; None: eager. ``longest``: most tokens that one of its
        requests attends to."""
        mine = NO_GRAPH
        if self.eligible(batch):
            # A promoted context was scheduled as something else, so only the variant that is always right fits.
            fast = Tier.FAST in self._tiers and not batch.context_last and all(map(_takes_likeliest, batch.generation))
            mine = Candidate(True, self.padded_size(batch.size), Tier.FAST if fast else Tier.FULL, longest)
        agreed = mine if self._agreement is None else self._agreed(mine, batch.size, self._agreement)
        key = self._captured_key(agreed)
        self.misses += agreed.eligible and key is None
        return key

    def _agreed(self, mine: Candidate, live: int, agreement: GraphAgreement) -> Candidate:
        """Pad to what all pad to, then run what all can run. A rank without the graph, or without the one that samples
        outside, which the others may need, is not ready."""
        common = agreement.common_size(mine)
        if common.eligible:
            mine = replace(mine, batch_size=self._padded_to(common.batch_size, live), longest=common.longest)
            if self._captured_key(mine) is None:
                mine = replace(mine, tier=Tier.FULL)
            if self._captured_key(replace(mine, tier=Tier.FULL)) is None:
                mine = NO_GRAPH
        return agreement.decide(mine)

    def _captured_key(self, candidate: Candidate) -> GraphKey | None:
        key = self._key(candidate, candidate.longest) if candidate.eligible else None
        return key if key is not None and self.state(key) is GraphState.CAPTURED else None

    def _key(self, agreed: Candidate, longest: int) -> GraphKey | None:
        at = 0 if self._length_buckets == (0,) else bisect_left(self._length_buckets, longest)
        if at == len(self._length_buckets):
            return None
        return GraphKey(agreed.batch_size, tier=agreed.tier, length_bucket=self._length_buckets[at])

    # -- capturing --------------------------------------------------------------------------------------------

    @contextmanager
    def allow_capture(self, *, warmup_only: bool = False) -> Iterator[None]:
        """Outside, an unknown key runs eagerly: a capture then could resize what older graphs use."""
        self.capture_allowed, self.warmup_only = True, warmup_only
        try:
            yield
        finally:
            self.capture_allowed = self.warmup_only = False

    def run(self, key: GraphKey, forward: Forward, metadata: object) -> None:
        """One warm-up or capture of ``key``; only inside ``allow_capture``.

        A failed capture leaves the key eager for good, with one line at level ERROR; ``AllocationError`` says which
        bucket found no room and what would help.
        """
        if not self.capture_allowed:
            raise StateError(f"{key} may not be captured now: graphs are captured during warm-up only")
        if self.state(key) in (GraphState.CAPTURED, GraphState.EAGER_ONLY):
            return
        try:
            if self.warmup_only or self._backend.warms_before_capture:
                with self._backend.warming():
                    forward()
            self._states[key] = GraphState.WARM
            if not self.warmup_only:
                self._capture(key, forward, metadata)
        except AllocationError as full:
            self._give_up(key)
            raise self._explained(full, key) from full
        except Exception:
            self._give_up(key)
            logger.exception("batches of %d run without a graph: the capture failed", key.batch_size)

    def _capture(self, key: GraphKey, forward: Forward, metadata: object) -> None:
        graph, self.memory_pool = self._backend.capture(forward, self.memory_pool)
        self.graphs[key] = graph
        self.outputs[key] = tuple(map(weakref.ref, graph.outputs))
        self.metadata[key] = metadata
        self._states[key] = GraphState.CAPTURED
        self._cleared = False

    def _give_up(self, key: GraphKey) -> None:
        self._states[key] = GraphState.EAGER_ONLY
        self.metadata.pop(key, None)
        self.outputs.pop(key, None)
        graph = self.graphs.pop(key, None)
        if graph is not None:
            graph.reset()

    def _explained(self, full: AllocationError, key: GraphKey) -> AllocationError:
        smaller = [bucket for bucket in self.buckets if bucket < key.batch_size]
        lower = f"a list that ends at {smaller[-1]}" if smaller else "cuda_graph_batch_sizes=()"
        return AllocationError(
            full.requested_bytes,
            full.free_bytes,
            kind=full.kind,
            tag=full.tag,
            owner="graphs",
            detail=f"This was the graph for batches of {key.batch_size}; the pool of graphs holds "
            f"{format_bytes(self.pool_bytes)}. What helps: fewer or lower cuda_graph_batch_sizes ({lower}), or a lower "
            "free_gpu_memory_fraction.",
        )

    def drop(self, key: GraphKey) -> None:
        """Leave ``key`` out: batches of it run eagerly. The pool goes with the last graph in it."""
        self._give_up(key)
        if not self.graphs and self.memory_pool is not None:
            pool, self.memory_pool = self.memory_pool, None
            self._backend.release_pool(pool)

    # -- running ----------------------------------------------------------------------------------------------

    def state(self, key: GraphKey) -> GraphState:
        return self._states.get(key, GraphState.NEW)

    def replay(self, key: GraphKey, metadata: object) -> Outputs:
        """Launch the graph of ``key``. Its inputs were written into their places before.

        The outputs lie in the pool: valid until the next replay of any graph. ``metadata`` is the object that was
        captured. ``UnknownKeyError`` for a key without a graph, ``StateError`` after ``clear``.
        """
        if self._cleared:
            raise StateError("the graphs were cleared: capture them again before a replay")
        if key not in self.graphs:
            known = ", ".join(str(known.batch_size) for known in self.graphs) or "none"
            raise UnknownKeyError(f"no graph for {key}; batch sizes captured: {known}")
        assert metadata is self.metadata[key], "a graph is replayed with the metadata it was captured with"
        graph = self.graphs[key]
        graph.replay()
        return graph.outputs

    def padded(self, rows: list[Request], key: GraphKey) -> AbstractContextManager[list[Request]]:
        """``rows`` filled up to the key's size; dummies are gone again afterwards."""
        if self.dummies is None:
            return _as_they_are(rows)
        return self.dummies.fill(rows, key.batch_size, key.draft_len)

    # -- memory -----------------------------------------------------------------------------------------------

    def graph_pool(self) -> Any | None:
        """The pool all graphs share; None before any capture."""
        return self.memory_pool

    @property
    def pool_bytes(self) -> int:
        return self._backend.pool_bytes(self.memory_pool)

    def clear(self) -> None:
        """Destroy every graph and give the pool's bytes back. Safe to call again."""
        self._cleared = bool(self.graphs) or self._cleared
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.outputs.clear()
        self.metadata.clear()
        self._states.clear()
        if self.dummies is not None:
            self.dummies.release()
        pool, self.memory_pool = self.memory_pool, None
        if pool is not None:
            self._backend.release_pool(pool)


def _takes_likeliest(request: Request) -> bool:
    """Whether argmax of the raw logits is this request's token."""
    params = request.params
    barred = len(request.output_token_ids) < params.min_tokens and bool(request.end_token_ids)
    return params.greedy and not params.penalised and not barred


@contextmanager
def _as_they_are(rows: list[Request]) -> Iterator[list[Request]]:
    yield rows
