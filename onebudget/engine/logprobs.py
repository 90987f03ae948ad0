"""Log-probabilities of tokens: of the rows that are sampled, and of prompt rows a few at a time.

A row of the vocabulary costs as much as thousands of hidden elements, so a prompt's rows never exist all at once: the
layers run once, then the model's own head runs over ``prompt_rows_at_once`` rows after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from onebudget.core import TokenLogprob
from onebudget.engine.sampled import HostCopy
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.core import Request, ScheduledBatch

OWNER = "logits"
_PROMPT_ROWS = 64  # below that, reading the head's weights again and again costs more than computing with them


def prompt_rows_at_once(config: BudgetConfig) -> int:
    """Most prompt rows whose logits exist at the same time: few enough for one dummy of the profile to show them."""
    return max(1, min(_PROMPT_ROWS, config.max_num_tokens - 1, config.max_seq_len - 2))


def kept_hidden_bytes(config: BudgetConfig, hidden_size: int, element_bytes: int) -> int:
    """What the layers of the largest step leave behind while prompt rows are computed from it."""
    return align_up(config.max_num_tokens * hidden_size * element_bytes, 512)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """float32 of the shape of ``logits``. Two float32 tensors of it exist at once, if the caller lets ``logits`` go."""
    logits = logits.float()
    return torch.log_softmax(logits, dim=-1)


def token_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """``token_ids[i]`` in row ``i`` of ``logprobs`` ``[rows, vocab]``, and the ``top[i]`` likeliest there.

    Rows without contents give an empty list.
    """
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device)
    return [] if logprobs.is_meta else LogprobRows(logprobs, wanted, top).read()


class LogprobRows:
    """Log-probabilities of ``wanted`` int64 ``[rows]`` in ``logprobs`` ``[rows, vocab]`` on their way to the host."""

    def __init__(self, logprobs: torch.Tensor, wanted: torch.Tensor, top: Sequence[int]) -> None:
        chosen = logprobs.gather(-1, wanted[:, None])
        ranks = (logprobs > chosen).sum(-1) + 1
        values, tokens = logprobs.topk(min(max(top), logprobs.shape[-1]), dim=-1)
        self._columns = [HostCopy(column) for column in (wanted, chosen.squeeze(-1), ranks, tokens, values)]
        self._top = top

    def read(self) -> list[TokenLogprob]:
        columns = (column.read() for column in self._columns)
        return [
            TokenLogprob(token, logprob, rank, tuple(zip(likeliest[:count], their[:count], strict=True)))
            for token, logprob, rank, likeliest, their, count in zip(*columns, self._top, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Rows ``first_row .. first_row + rows`` of a packed step; they predict the prompt tokens from ``position`` on."""

    request: Request
    first_row: int
    rows: int
    position: int

    def take(self, logprobs: torch.Tensor) -> None:
        """Write the piece's ``logprobs`` ``[rows, vocab]`` into its request."""
        request, count = self.request, self.request.params.prompt_logprobs
        assert count is not None
        expected = request.prompt_token_ids[self.position : self.position + self.rows]
        # A step that is tried again writes the same places again.
        del request.prompt_logprobs[self.position :]
        request.prompt_logprobs += token_logprobs(logprobs, expected, [count] * self.rows)


def prompt_pieces(batch: ScheduledBatch, rows_at_once: int) -> list[PromptPiece]:
    """The rows of this step that predict a prompt token somebody wants log-probabilities of, in pieces."""
    pieces, start = [], 0
    for request in batch.context:
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = request.prompt_logprobs or [None]
            following = min(request.chunk_tokens, request.prompt_tokens - request.computed_tokens - 1)
            for done in range(0, following, rows_at_once):
                rows = min(rows_at_once, following - done)
                pieces.append(PromptPiece(request, start + done, rows, request.computed_tokens + done + 1))
        start += request.chunk_tokens
    return pieces


@contextmanager
def layers_once(module: Any) -> Iterator[None]:
    """Inside, only the first call of a causal language ``module`` runs its layers; later calls run its head on what
    they gave.

    The module's own forward stays in charge, so logits are scaled and capped as always. Where it doesn't reach its
    layers by calling its base model, nothing is kept and every call runs everything, with the same results.
    """
    name = module.base_model_prefix
    layers = getattr(module, name, None)
    if not isinstance(layers, torch.nn.Module) or name not in module._modules:
        yield
        return
    module._modules[name] = _Kept(layers)
    try:
        yield
    finally:
        module._modules[name] = layers


class _Kept(torch.nn.Module):
    """Stands where the layers stand, and gives what they gave the first time."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self._layers = [layers]  # in a list, so that it does not count as a child
        self._output: Any = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layers[0], name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self._output is None:
            self._output = self._layers[0](*inputs, **options)
        return self._output
