"""The calls that captures on CUDA make, against a stand-in of torch.cuda: one pool, one stream, nothing left behind."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from onebudget.graphs.cuda_graph import CUDAGraphBackend
from onebudget.graphs.keys import GraphKey
from onebudget.graphs.runner import CUDAGraphRunner


class Card:
    """Free bytes of a card and a log of what torch was asked."""

    def __init__(self) -> None:
        self.torch_device = "cuda:0"
        self.free = 1000
        self.log: list[Any] = []

    def free_bytes(self) -> int:
        return self.free

    def empty_cache(self) -> None:
        self.log.append("empty_cache")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()

    class Graph:
        def __init__(self) -> None:
            self._pool: object = None

        def pool(self) -> object:
            return self._pool

        def replay(self) -> None:
            card.log.append("replay")

        def reset(self) -> None:
            card.log.append("reset")

    @contextmanager
    def capturing(graph: Graph, *, pool: object, stream: object) -> Any:
        card.log.append(("capture", pool, stream, torch.is_inference_mode_enabled()))
        yield
        graph._pool = pool or ("pool", 1)
        card.free -= 100 if pool is None else 10

    fakes = {
        "CUDAGraph": Graph,
        "graph": capturing,
        "Stream": lambda device: f"stream of {device}",
        "synchronize": lambda device: None,
        "stream": lambda stream: SimpleNamespace(__enter__=None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return card


def test_later_captures_get_the_pool_of_the_first(card: Card) -> None:
    backend = CUDAGraphBackend(card)  # type: ignore[arg-type]
    first, pool = backend.capture(lambda: (torch.ones(1),), None)
    second, again = backend.capture(lambda: (torch.ones(2),), pool)
    assert again == pool == ("pool", 1)
    captures = [entry for entry in card.log if entry[0] == "capture"]
    assert captures == [("capture", None, "stream of cuda:0", True), ("capture", pool, "stream of cuda:0", True)]
    assert backend.pool_bytes(pool) == 110
    second.replay()
    assert card.log[-1] == "replay"
    for graph in (first, second):
        graph.reset()
        assert graph.outputs == ()
    backend.release_pool(pool)
    assert card.log[-3:] == ["reset", "reset", "empty_cache"]
    assert backend.pool_bytes(pool) == 0


def test_a_failed_capture_is_destroyed(card: Card) -> None:
    backend = CUDAGraphBackend(card)  # type: ignore[arg-type]

    def forward() -> tuple[()]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        backend.capture(forward, None)
    assert card.log[-1] == "reset"
    assert backend.pool_bytes(None) == 0


def test_every_capture_is_warmed_on_its_stream(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def on_stream(stream: str) -> Any:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    runner = CUDAGraphRunner(CUDAGraphBackend(card), [1, 2], max_batch_size=2)  # type: ignore[arg-type]
    for only in (True, False):
        with runner.allow_capture(warmup_only=only):
            for key in runner.capture_keys():
                runner.run(key, lambda: (), None)
    assert entered == ["stream of cuda:0"] * 4
    runner.replay(GraphKey(2), None)
    runner.clear()
    assert runner.graph_pool() is None
