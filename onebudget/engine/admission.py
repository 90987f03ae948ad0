"""Refuse at submission what can never run, with the numbers that say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import RequestError
from onebudget.resources.kv.manager import blocks_to_completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onebudget.config import BudgetConfig
    from onebudget.core import SamplingParams


def admitted_new_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    config: BudgetConfig,
    vocab_size: int,
    pool_blocks: int,
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
    new_tokens = min(params.max_tokens, config.max_seq_len - length + 1)
    needed = blocks_to_completion(length, new_tokens, config.tokens_per_block)
    if needed > pool_blocks:
        raise RequestError(
            f"the request needs {needed} KV blocks to completion ({length:,} prompt and {new_tokens:,} new tokens in "
            f"blocks of {config.tokens_per_block}) and the pool has {pool_blocks}: ask for at most "
            f"{max(0, pool_blocks * config.tokens_per_block - length):,} new tokens, or give the cache more memory."
        )
    return new_tokens
