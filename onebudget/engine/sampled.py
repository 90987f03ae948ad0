"""Tokens of one step on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class HostCopy:
    """A small tensor as Python values, once it has arrived.

    On CUDA the copy goes through pinned memory behind the work that made the tensor, and reading waits for that copy
    alone, not for what was launched after it. Elsewhere the values are there at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._staged: torch.Tensor | None = None
        self._values: list[Any] | None = None
        if tensor.is_meta:
            self._values = torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()
        elif tensor.is_cuda:
            self._staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._staged.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._values = tensor.tolist()

    def read(self) -> list[Any]:
        if self._values is None:
            assert self._event is not None and self._staged is not None
            self._event.synchronize()
            self._values = self._staged.tolist()
        return self._values


class SampledTokens:
    """The tokens of a step; ``read`` waits for them and then runs ``notes``, each with all tokens."""

    def __init__(self, tokens: HostCopy, notes: Sequence[Callable[[], None]] = ()) -> None:
        self._tokens = tokens
        self._notes = list(notes)

    @classmethod
    def known(cls, tokens: list[int]) -> SampledTokens:
        """Tokens that are on the host already."""
        return cls(HostCopy(torch.tensor(tokens, dtype=torch.int64)))

    def read(self) -> list[int]:
        tokens = self._tokens.read()
        while self._notes:
            self._notes.pop(0)()
        return tokens
