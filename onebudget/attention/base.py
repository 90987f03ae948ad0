"""The contract of an attention backend: three declarations of memory, then the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar

from onebudget.attention.pages import LayerPages

if TYPE_CHECKING:
    import torch

    from onebudget.attention.pages import PageGroup
    from onebudget.attention.plan import StepPlan
    from onebudget.config import BudgetConfig
    from onebudget.models.facts import ModelFacts
    from onebudget.workspace import ScratchBuffer


class AttentionBackend(ABC):
    """Computes attention for one packed step and owns nothing but views.

    The three class-level answers are asked before anything is allocated. They must equal what the computation
    really takes, or be a documented upper bound: too little runs out of memory inside a forward, too much is
    lost to the cache.
    """

    name: ClassVar[str]
    kv_dtypes: ClassVar[frozenset[str]] = frozenset({"auto"})
    """Values of the ``kv_cache_dtype`` knob that this backend can store."""

    profiles_full_cache: ClassVar[bool] = True
    """Whether a step behind a full cache may take more beside the scratch than one of fresh prompts, so that the
    profile has to run one."""

    reads_lengths: ClassVar[bool] = False
    """Whether a captured decode reads lengths when it is replayed, so that one graph serves all of them where the host
    can read what its device holds. Otherwise a graph is laid out for one length."""

    supports_workspace_reclamation: ClassVar[bool] = False
    """Whether the scratch carries nothing from one forward to the next, so that it may be replaced in between."""

    def __init__(self, groups: Sequence[PageGroup], scratch: ScratchBuffer, model: ModelFacts, dtype: str) -> None:
        """``groups``: the cache, see ``page_groups``. ``dtype``: torch's name of the computing dtype."""
        self._pages = LayerPages(groups)
        self._scratch = scratch
        self.kv_written = False
        """Whether a layer of the step in hand may have written to the cache; cleared by whoever begins a step."""

    @classmethod
    def workspace_bytes_per_token(cls, model: ModelFacts, element_bytes: int) -> int:
        """Scratch bytes per attended token of prompt pieces in one step, beyond the fixed bytes.

        ``element_bytes``: size of an element of the computing dtype, in which scratch is kept.
        """
        return 0

    @classmethod
    def workspace_is_chunk_bounded(cls, model: ModelFacts) -> bool:
        """Whether chunked prefill bounds that scratch by the chunk."""
        return True

    @classmethod
    def workspace_fixed_bytes(cls, model: ModelFacts, element_bytes: int, config: BudgetConfig) -> int:
        """Scratch bytes that exist whatever the batch; reserved whole."""
        return 0

    @classmethod
    @abstractmethod
    def page_parts(cls, model: ModelFacts) -> tuple[tuple[int, ...], ...]:
        """Shapes of what one token caches in one layer, part by part: K and V, or one latent."""

    @abstractmethod
    def begin(self, plan: StepPlan) -> None:
        """Take the plan of the next forward. Scratch grows here, never inside a layer."""

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
        up_projection: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's K/V to their pages and attend.

        query ``[1, heads, tokens, head_dim]``, key and value ``[1, kv_heads, tokens, head_dim]``;
        returns ``[1, tokens, heads, head_dim]``.

        A latent layer gives its two latents in place of key and value, ``[1, 1, tokens, rank]`` and
        ``[1, 1, tokens, rope_dim]``, and with ``up_projection`` ``[heads * (nope_dim + value_dim), rank]`` the weight
        that would expand them.
        """


current_backend: ContextVar[AttentionBackend] = ContextVar("current_backend")
