from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.core import Request, SamplingParams
from onebudget.devtools.scripted import scripted_executor
from onebudget.engine.admission import admitted_new_tokens, refuse_what_never_fits
from onebudget.errors import RequestError
from onebudget.resources import KVCacheManager, ResourceKind, ResourceManager
from onebudget.resources.kv.store import CountedStore

VOCABULARY = 100


def admit(prompt: int | list[int], max_tokens: int = 16, pool_blocks: int = 100, **knobs: Any) -> int:
    config = BudgetConfig(**{"max_seq_len": 64, "max_num_tokens": 32, "tokens_per_block": 8, **knobs})
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens)
    new_tokens = admitted_new_tokens(ids, params, config=config, vocab_size=VOCABULARY)
    kv = KVCacheManager(CountedStore(pool_blocks, config.tokens_per_block))
    request = Request(0, ids, params, max_new_tokens=new_tokens)
    refuse_what_never_fits(request, ResourceManager({ResourceKind.KV: kv}).block_budgets(request), config)
    return new_tokens


@pytest.mark.parametrize(
    ("prompt", "wanted", "got"), [(1, 16, 16), (48, 16, 16), (49, 16, 16), (50, 16, 15), (64, 9, 1)]
)
def test_new_tokens_are_cut_so_that_the_cache_holds_max_seq_len(prompt: int, wanted: int, got: int) -> None:
    assert admit(prompt, wanted) == got


def test_one_token_more_than_max_seq_len_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"65 tokens and max_seq_len is 64: shorten it by 1 "):
        admit(65)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens: at least 1"):
        admit([])


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 10**9])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(RequestError, match=f"{bad} is outside the vocabulary: ids run from 0 to 99"):
        admit([1, bad, 2])
    assert admit([0, VOCABULARY - 1]) == 16


def test_without_chunks_a_prompt_must_fit_in_one_step() -> None:
    assert admit(32, enable_chunked_prefill=False) == 16
    assert admit(33) == 16
    with pytest.raises(
        RequestError, match=r"33 tokens, a step computes at most max_num_tokens = 32, and chunked prefill is off"
    ):
        admit(33, enable_chunked_prefill=False)


def test_the_pool_is_filled_to_the_block_and_one_more_is_refused() -> None:
    assert admit(20, 12, pool_blocks=4) == 12
    with pytest.raises(RequestError, match=r"needs 5 KV blocks .*pool has 4: ask for at most 12 new tokens"):
        admit(20, 13, pool_blocks=4)


@given(prompt=st.integers(1, 64), wanted=st.integers(1, 100), pool=st.integers(0, 12))
def test_whatever_is_advised_is_accepted(prompt: int, wanted: int, pool: int) -> None:
    try:
        assert 1 <= admit(prompt, wanted, pool_blocks=pool) <= wanted
    except RequestError as refused:
        said = str(refused)
        if "ask for at most " in said:
            advised = int(said.split("ask for at most ")[1].split()[0].replace(",", ""))
            assert admit(prompt, advised, pool_blocks=pool) == advised
            with pytest.raises(RequestError):
                admit(prompt, advised + 1, pool_blocks=pool)
        elif "shorten the prompt to " in said:
            shorter = int(said.split("shorten the prompt to ")[1].split()[0].replace(",", ""))
            assert admit(shorter, 1, pool_blocks=pool) == 1
            with pytest.raises(RequestError):
                admit(shorter + 1, 1, pool_blocks=pool)
        else:
            assert pool == 0, "only more memory helps"


def test_a_request_of_max_seq_len_runs_where_the_ledger_says_one_fits() -> None:
    """A pool of max_seq_len tokens is enough for one request of that length, prompt and answer together."""
    assert admit(63, 1, pool_blocks=64 // 8) == 1
    with pytest.raises(RequestError, match="needs 9 KV blocks"):
        admit(64, 1, pool_blocks=64 // 8)


@given(prompt=st.integers(1, 64), new=st.integers(1, 60), pool=st.integers(1, 12))
def test_who_is_refused_needs_more_than_there_is_and_who_is_not_completes(prompt: int, new: int, pool: int) -> None:
    config = BudgetConfig(max_seq_len=128, max_num_tokens=64, tokens_per_block=8)
    engine = scripted_executor(config, pool)
    request = Request(0, [1] * prompt, SamplingParams(), max_new_tokens=new)
    budgets = engine.resources.block_budgets(request)
    try:
        refuse_what_never_fits(request, budgets, config)
    except RequestError:
        assert budgets[0][1] > budgets[0][2] == pool
        assert engine.kv.free_blocks == pool and engine.slots.free_slots == config.max_batch_size
        return
    engine.submit(request)
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "length"


def test_beams_and_other_pools_are_named() -> None:
    config = BudgetConfig(max_seq_len=128, max_num_tokens=64, tokens_per_block=8)
    request = Request(0, [1] * 9, SamplingParams(), max_new_tokens=3)
    with pytest.raises(
        RequestError, match=r"needs 7 cross_kv blocks .*\(9 prompt and 3 new tokens.* pool has 6: give the"
    ):
        refuse_what_never_fits(request, [(ResourceKind.KV, 2, 6), (ResourceKind.CROSS_KV, 7, 6)], config)
