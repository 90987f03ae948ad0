"""What a multimodal encoder tells the profile: a dummy pass of its own, and how much of its output may be alive."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class MultimodalEncoder(Protocol):
    """The encoder in front of a language model.

    ``output_budget_bytes``: the most output of running requests that is alive at once. ``cache_bytes``: capacity of the
    cache of encoder outputs, 0 where there is none.
    """

    output_budget_bytes: int
    cache_bytes: int

    def encode_dummies(self) -> torch.Tensor | None:
        """Encode as much as one pass may take, alone; None when there are no dummy inputs for this encoder."""


def dummy_output(encoder: MultimodalEncoder | None, metered: AbstractContextManager[object]) -> torch.Tensor | None:
    """A detached copy of the output of the encoder's dummy pass, to be kept alive while the language model's dummies
    run: requests own copies in service, not views of a batch."""
    if encoder is None:
        return None
    import torch

    with torch.no_grad(), metered:
        output = encoder.encode_dummies()
        return None if output is None else output.detach().clone()
