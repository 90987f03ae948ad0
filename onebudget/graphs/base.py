"""What the runner asks of a platform's graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

Outputs = tuple["torch.Tensor", ...]
Forward = Callable[[], Outputs]


class CapturedGraph(ABC):
    """One capture. ``outputs`` lie in the pool: valid until the next replay of any graph of the pool."""

    outputs: Outputs
    nbytes: int = 0
    """What it uses of the pool while it runs, where that is known."""

    @abstractmethod
    def replay(self) -> None: ...

    @abstractmethod
    def reset(self) -> None:
        """Destroy it; what it kept resident goes back to the pool."""


class GraphBackend(ABC):
    """Captures forwards. All graphs captured with one ``pool`` share its memory, because only one runs at a time.

    ``warms_before_capture``: kernels are chosen, and their libraries' scratch made, by a forward right before each
    capture.
    """

    warms_before_capture: ClassVar[bool] = True
    pool_limit_bytes: int | None = None
    """What the pool may grow to, where that can be told before it grows: a capture beyond it finds no room."""

    @abstractmethod
    def capture(self, forward: Forward, pool: Any | None) -> tuple[CapturedGraph, Any]:
        """Capture one call of ``forward``; returns the graph and the pool to pass in next time.

        Raises whatever the forward raises, ``StateError`` for operations that no graph can hold and
        ``AllocationError`` when the pool can't grow; nothing of the capture is left then.
        """

    @abstractmethod
    def pool_bytes(self, pool: Any | None) -> int:
        """Device bytes the pool holds."""

    @abstractmethod
    def release_pool(self, pool: Any) -> None:
        """Give the pool's bytes back to the device, once all its graphs are reset."""

    def warming(self) -> AbstractContextManager[object]:
        """Around eager warm-up forwards."""
        return nullcontext()
