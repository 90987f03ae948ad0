"""The contract of an attention backend: three declarations of memory, then the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from onebudget.config import BudgetConfig
    from onebudget.models.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class ContextSpan:
    """One prompt piece inside a packed step: rows ``start .. start+tokens`` attend to ``attended`` tokens,
    themselves included."""

    start: int
    tokens: int
    attended: int
    prefix_blocks: torch.Tensor  # int64 [blocks of the tokens cached before this piece], first to last


class AttentionBackend(ABC):
    """Computes attention for one packed step and owns nothing but views.

    The three class-level answers are asked before anything is allocated. They must equal what the computation
    really takes, or be a documented upper bound: too little runs out of memory inside a forward, too much is
    lost to the cache.
    """

    name: ClassVar[str]

    @classmethod
    def workspace_bytes_per_token(cls, model: ModelFacts, kv_dtype_bytes: int) -> int:
        """Scratch bytes per attended token of prompt pieces in one step."""
        return 0

    @classmethod
    def workspace_is_chunk_bounded(cls, model: ModelFacts) -> bool:
        """Whether chunked prefill bounds that scratch by the chunk."""
        return True

    @classmethod
    def workspace_fixed_bytes(cls, model: ModelFacts, kv_dtype_bytes: int, config: BudgetConfig) -> int:
        """Scratch bytes that exist whatever the batch; reserved whole."""
        return 0

    @abstractmethod
    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write this step's K/V to their pages and attend.

        query ``[1, heads, tokens, head_dim]``, key and value ``[1, kv_heads, tokens, head_dim]``;
        returns ``[1, tokens, heads, head_dim]``.
        """


current_backend: ContextVar[AttentionBackend] = ContextVar("current_backend")
