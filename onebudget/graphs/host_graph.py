"""Graphs on this machine's processor: recorded operations, replayed into frozen memory without the model's Python.

What makes CUDA graphs hard holds here too: host values are frozen, inputs are written in place, memory stays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from onebudget.graphs.base import CapturedGraph, Forward, GraphBackend, Outputs
from onebudget.graphs.host_pool import SegmentPool
from onebudget.graphs.recording import Call, Recorder, Recording, Slot

if TYPE_CHECKING:
    from onebudget.buffers import BufferManager

_Step = Callable[[], object]


class HostGraph(CapturedGraph):
    """A recording over one arena."""

    def __init__(self, recording: Recording, arena: torch.Tensor, offsets: list[int]) -> None:
        self.nbytes = arena.numel() + recording.workspace_bytes

        def real(slot: Slot) -> torch.Tensor:
            return slot.in_arena(arena, offsets[slot.storage])

        self._steps = [_step(tree_map_only(Slot, real, _parts(call))) for call in recording.calls]
        self.outputs: Outputs = tuple(tree_map_only(Slot, real, recording.outputs))

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self._steps:
                step()

    def reset(self) -> None:
        self._steps = []
        self.outputs = ()

    @property
    def operations(self) -> int:
        return len(self._steps)


class HostGraphBackend(GraphBackend):
    """Records on the CPU, or on ``meta`` tensors of a fake device, where the pool holds numbers only."""

    warms_before_capture: ClassVar[bool] = False

    def __init__(
        self, manager: BufferManager, *, scope: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._manager = manager
        self._scope = scope

    def capture(self, forward: Forward, pool: Any | None) -> tuple[CapturedGraph, Any]:
        recorder = Recorder()
        with torch.inference_mode(False), torch.no_grad():
            with recorder:
                outputs = forward()
            recording = recorder.finish(outputs)
        del outputs
        offsets, arena_bytes = recording.plan()
        pool = pool or SegmentPool(self._manager, scope=self._scope)
        assert isinstance(pool, SegmentPool)
        # The part behind the arena is what operations take for themselves while they run.
        arena = pool.place(arena_bytes + recording.workspace_bytes, limit_bytes=self.pool_limit_bytes)[:arena_bytes]
        return HostGraph(recording, arena, offsets), pool

    def pool_bytes(self, pool: Any | None) -> int:
        return pool.allocated_bytes if isinstance(pool, SegmentPool) else 0

    def release_pool(self, pool: Any) -> None:
        assert isinstance(pool, SegmentPool)
        pool.release()


def _parts(call: Call) -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Slot, ...]]:
    return call.operation, call.args, call.kwargs, call.results


def _step(parts: tuple[Any, Any, Any, Any]) -> _Step:
    operation, args, kwargs, results = parts
    if not results:
        return partial(operation, *args, **kwargs)
    return partial(_computed_then_copied(operation, results), *args, **kwargs)


def _computed_then_copied(operation: Callable[..., Any], results: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> None:
        made = [leaf for leaf in tree_leaves(operation(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for result, computed in zip(results, made, strict=True):
            result.copy_(computed)

    return run
