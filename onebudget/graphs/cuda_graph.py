"""CUDA graphs through torch: one private pool per runner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from onebudget.graphs.base import CapturedGraph, Forward, GraphBackend, Outputs

if TYPE_CHECKING:
    from onebudget.device.base import Device


class CapturedCUDAGraph(CapturedGraph):
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self.outputs = ()
        self._graph.reset()


class CUDAGraphBackend(GraphBackend):
    """Captures on a stream of its own: a shared one couples graph sets through scratch that libraries keep per
    stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.torch_device)
        self._bytes: dict[Any, int] = {}

    def capture(self, forward: Forward, pool: Any | None) -> tuple[CapturedGraph, Any]:
        """The pool's bytes are what the device lost over its captures: torch does not count a pool by itself."""
        torch.cuda.synchronize(self._device.torch_device)
        self._device.empty_cache()
        before = self._device.free_bytes()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.inference_mode(), torch.cuda.graph(graph, pool=pool, stream=self._stream):
                outputs = forward()
        except BaseException:
            graph.reset()
            raise
        handle = graph.pool()
        self._bytes[handle] = self._bytes.get(handle, 0) + max(0, before - self._device.free_bytes())
        return CapturedCUDAGraph(graph, outputs), handle

    def pool_bytes(self, pool: Any | None) -> int:
        return self._bytes.get(pool, 0)

    def release_pool(self, pool: Any) -> None:
        self._bytes.pop(pool, None)
        torch.cuda.synchronize(self._device.torch_device)
        self._device.empty_cache()

    def warming(self) -> AbstractContextManager[object]:
        """Libraries make their handles and scratch on the stream that captures."""
        return torch.cuda.stream(self._stream)
