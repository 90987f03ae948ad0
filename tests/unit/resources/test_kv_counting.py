from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, SamplingParams
from onebudget.resources import KVCacheManager
from onebudget.resources.kv.counting import (
    blocks_to_completion,
    recurrent_state_slots,
)
from onebudget.resources.kv.cross import CrossKVCacheManager
from onebudget.resources.kv.group import KVGroup
from onebudget.resources.kv.store import CountedStore
from onebudget.resources.kv.v2 import KVCacheManagerV2, index_slots


@pytest.mark.parametrize(
    ("prompt", "new", "beams", "blocks"),
    [(100, 60, 1, 5), (100, 60, 4, 11), (96, 1, 2, 5), (64, 64, 1, 4), (320, 160, 1, 15), (32, 32, 1, 2)],
)
def test_blocks_to_completion_of_worked_cases(prompt: int, new: int, beams: int, blocks: int) -> None:
    assert blocks_to_completion(prompt, new, 32, beams) == blocks


@given(prompt=st.integers(1, 500), new=st.integers(0, 500), size=st.integers(1, 64), beams=st.integers(1, 5))
def test_beams_share_whole_prompt_blocks_alone(prompt: int, new: int, size: int, beams: int) -> None:
    one = blocks_to_completion(prompt, new, size)
    assert one == -(-(prompt + new) // size)
    assert blocks_to_completion(prompt, new, size, beams) == one + (beams - 1) * (one - prompt // size)


def manager(blocks: int, **settings: int) -> KVCacheManager:
    return KVCacheManager(CountedStore(blocks, 32), **settings)  # type: ignore[arg-type]


def request(prompt: int, new: int, *, encoder: int | None = None) -> Request:
    return Request(0, [1] * prompt, SamplingParams(), max_new_tokens=new, encoder_tokens=encoder)


def test_the_budget_counts_extra_tokens_drafts_and_beams_and_the_need_of_admission_does_not() -> None:
    kv = manager(15, extra_kv_tokens=1, draft_reserve_tokens=3, beam_width=4)
    assert kv.request_kv_block_budget(request(100, 64)) == (15, 15)
    assert kv.needed_to_completion(request(100, 64)) == 6


def test_a_pool_filled_to_the_block_takes_one_request_and_not_one_token_more() -> None:
    kv = manager(5)
    assert kv.request_kv_block_budget(request(100, 60)) == (5, 5)
    required, capacity = kv.request_kv_block_budget(request(100, 61)) or (0, 0)
    assert required == 6 > capacity


@pytest.mark.parametrize(
    ("kv", "applies"),
    [
        (KVCacheManager(CountedStore(4, 32)), True),
        (KVCacheManager(CountedStore(4, 32), recurrent=True), False),
        (KVCacheManager(KVGroup(CountedStore(40, 32), window_tokens=64)), False),
        (KVCacheManager([KVGroup(CountedStore(40, 32)), KVGroup(CountedStore(40, 32), window_tokens=64)]), False),
        (KVCacheManagerV2(CountedStore(4, 32)), True),
        (type("Own", (KVCacheManager,), {})(CountedStore(4, 32)), False),
        (CrossKVCacheManager(CountedStore(4, 32)), True),
    ],
    ids=["plain", "recurrent", "window", "windows", "v2", "subclass", "cross"],
)
def test_only_who_counts_exactly_may_refuse(kv: KVCacheManager, applies: bool) -> None:
    assert kv.kv_block_budget_applies() is applies
    assert (kv.request_kv_block_budget(request(10, 5, encoder=33)) is not None) is applies


def test_cross_blocks_are_those_of_the_encoder() -> None:
    kv = CrossKVCacheManager(CountedStore(4, 32))
    assert kv.request_kv_block_budget(request(10, 5, encoder=64)) == (2, 4)
    assert kv.request_kv_block_budget(request(10, 5, encoder=65)) == (3, 4)


def test_states_of_recurrent_layers() -> None:
    assert recurrent_state_slots(max_batch_size=64, pool_tokens=112_625, snapshot_interval=256) == 504
    assert recurrent_state_slots(max_batch_size=64) == 65
    assert recurrent_state_slots(max_batch_size=64, pp_size=2, graph_padding=False, max_draft_tokens=3) == 131


def test_slots_of_tables() -> None:
    assert index_slots(max_batch_size=8, pp_size=2, reserved_slots=1) == 17
    assert index_slots(max_batch_size=8, is_disaggregated=True) == 16
