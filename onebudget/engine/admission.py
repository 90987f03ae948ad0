"""Refuse at submission what can never run, with the numbers that say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import RequestError
from onebudget.resources.base import ResourceKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from onebudget.config import BudgetConfig
    from onebudget.core import Request, SamplingParams


def admitted_new_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    config: BudgetConfig,
    vocab_size: int,
) -> int:
    """New tokens this request may get: ``max_tokens``, cut so that its cached tokens stay within ``max_seq_len``.

    The last token is never written to the cache, so a prompt of exactly ``max_seq_len`` tokens gets one.
    Raises ``RequestError`` when the request can never run.
    """
    if params.penalised and not config.enable_penalties:
        raise RequestError(
            "penalties are off, so their tables have no reserve: leave out repetition_penalty, presence_penalty and "
            "frequency_penalty, or start with enable_penalties on."
        )
    length = len(prompt_token_ids)
    if length == 0:
        raise RequestError("the prompt has no tokens: at least 1 is needed.")
    bad = next((token for token in prompt_token_ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is outside the vocabulary: ids run from 0 to {vocab_size - 1}.")
    if length > config.max_seq_len:
        raise RequestError(
            f"the prompt has {length:,} tokens and max_seq_len is {config.max_seq_len:,}: shorten it by "
            f"{length - config.max_seq_len:,} tokens or start with --max-seq-len {length + params.max_tokens}."
        )
    if length > config.max_num_tokens and not config.enable_chunked_prefill:
        raise RequestError(
            f"the prompt has {length:,} tokens, a step computes at most max_num_tokens = {config.max_num_tokens:,}, "
            "and chunked prefill is off: switch it on or raise max_num_tokens."
        )
    return min(params.max_tokens, config.max_seq_len - length + 1)


def refuse_what_never_fits(
    request: Request, budgets: Iterable[tuple[ResourceKind, int, int]], config: BudgetConfig
) -> None:
    """``RequestError`` with the numbers when a pool that can tell needs more blocks for the request than it has.

    ``budgets`` are ``(kind, required, capacity)`` as the managers give them.
    """
    for kind, required, capacity in budgets:
        if required <= capacity:
            continue
        name = "KV" if kind is ResourceKind.KV else kind.value
        beams = f", {config.max_beam_width} beams" if config.max_beam_width > 1 else ""
        raise RequestError(
            f"the request needs {required} {name} blocks to completion ({request.prompt_tokens:,} prompt and "
            f"{request.max_new_tokens:,} new tokens in blocks of {config.tokens_per_block}{beams}) and the pool has "
            f"{capacity}: {_ways_out(request, kind, capacity, config)}."
        )


def _ways_out(request: Request, kind: ResourceKind, capacity: int, config: BudgetConfig) -> str:
    """What would make it fit. Beams share a prompt's full blocks; an encoder's length stays as it is."""
    memory = "give the cache more memory"
    if kind is ResourceKind.CROSS_KV:
        return memory
    size, beams = config.tokens_per_block, config.max_beam_width
    full, rest = divmod(request.prompt_tokens, size)
    new_tokens = (capacity - full) // beams * size - rest
    if new_tokens > 0:
        return f"ask for at most {new_tokens:,} new tokens, or {memory}"
    longest_prompt = (capacity - beams + 1) * size - 1
    if longest_prompt < 1:
        return memory
    return f"shorten the prompt to {longest_prompt:,} tokens, which leaves room for one new token, or {memory}"
