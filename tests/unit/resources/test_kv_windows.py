"""Layers that look back a window only: their front blocks return, and pools are counted together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.budget.cost import CacheCost
from onebudget.config import BudgetConfig
from onebudget.core import Request, RequestState, SamplingParams, ScheduledBatch
from onebudget.errors import BudgetError, CapacityError, ConfigError
from onebudget.resources import KVCacheManager
from onebudget.resources.kv import division
from onebudget.resources.kv.group import KVGroup, window_reach_blocks
from onebudget.resources.kv.store import CountedStore


def two_groups(full: int = 20, windowed: int = 20, *, window: int = 6, slack: int = 0) -> KVCacheManager:
    return KVCacheManager(
        [
            KVGroup(CountedStore(full, 4), layers=[1]),
            KVGroup(CountedStore(windowed, 4), layers=[0], window_tokens=window, step_slack_blocks=slack),
        ],
        reuse=True,
    )


def request(number: int, prompt: int, new: int = 1) -> Request:
    return Request(number, [1] * prompt, SamplingParams(), max_new_tokens=new, state=RequestState.CONTEXT)


def step(kv: KVCacheManager, one: Request, tokens: int) -> None:
    one.chunk_tokens = tokens
    batch = ScheduledBatch()
    batch.add(one)
    kv.prepare(batch)
    one.computed_tokens += len(one.tokens_of_step())
    if one.computed_tokens >= one.prompt_tokens:
        one.state = RequestState.GENERATION
        one.output_token_ids.append(1)
    kv.update(batch)


def test_front_blocks_return_once_no_coming_token_sees_them() -> None:
    """Behind c tokens the next one sees c - 5 and later, so blocks of four that end before that go."""
    kv = two_groups()
    full, windowed = kv.groups
    one = request(0, 12, 9)
    step(kv, one, 12)
    removed = []
    for _ in range(8):
        removed.append((one.computed_tokens, kv.front_removed(one, 6)))
        step(kv, one, 1)
    assert removed == [(12, 1), (13, 2), (14, 2), (15, 2), (16, 2), (17, 3), (18, 3), (19, 3)]
    assert (full.used_blocks, windowed.used_blocks) == (5, 2)
    assert windowed.block_table(one)[:3] == [0, 0, 0]
    assert windowed.first_block(one) == 3
    assert full.first_block(one) == 0
    kv.free(one)
    assert (full.free_blocks, windowed.free_blocks) == (20, 20)


@given(window=st.integers(1, 40), size=st.integers(1, 16), tokens=st.integers(0, 200))
def test_what_stays_is_what_is_seen_and_no_whole_block_more(window: int, size: int, tokens: int) -> None:
    group = KVGroup(CountedStore(200, size), window_tokens=window)
    removed = group.front_removed(tokens)
    seen_from = max(0, tokens + 1 - window)
    assert removed * size <= seen_from < (removed + 1) * size
    held = -(-(tokens + 1) // size) - removed
    assert held <= window_reach_blocks(window, size)
    assert group.blocks_at_end(tokens + 1) >= held


def test_the_window_must_be_named_where_there_are_several() -> None:
    kv, one = two_groups(), request(0, 4)
    step(kv, one, 4)
    with pytest.raises(ConfigError, match="None, 6"):
        kv.front_removed(one)
    with pytest.raises(ConfigError, match="None, 6"):
        kv.front_removed(one, 7)
    single = KVCacheManager(KVGroup(CountedStore(9, 4), window_tokens=4))
    step(single, two := request(1, 9), 9)
    assert single.front_removed(two) == 1


def test_windows_reuse_nothing() -> None:
    kv = two_groups()
    for number in range(2):
        one = request(number, 12)
        assert kv.reusable_tokens(one) == 0
        step(kv, one, 12)
        kv.free(one)
    assert not kv.reuses
    assert kv.counters.reused == 0


def test_a_request_counts_where_its_share_is_largest() -> None:
    kv = two_groups(full=20, windowed=10, window=6)
    assert kv.max_resource_count() == 20
    assert kv.needed_to_completion(request(0, 40)) == 11  # 41 tokens in the full pool, 3 of 10 blocks in the other
    assert kv.needed_to_completion(request(0, 7)) == 4  # 2 of 20 and 2 of 10


def test_capacity_leaves_room_for_the_pieces_of_a_step() -> None:
    kv = KVCacheManager(KVGroup(CountedStore(9, 4), window_tokens=6, step_slack_blocks=4))
    assert kv.max_resource_count() == 5
    one = request(0, 40)
    with pytest.raises(CapacityError) as full:
        step(kv, one, 40)
    assert (full.value.needed, full.value.free) == (10, 9)
    step(kv, one, 18)
    step(kv, one, 18)
    assert kv.used_blocks == 2


def config(**settings: object) -> BudgetConfig:
    return BudgetConfig(
        **{"max_seq_len": 64, "max_batch_size": 2, "max_num_tokens": 32, "tokens_per_block": 4, **settings}
    )


def test_layers_are_grouped_by_window_and_full_ones_come_first() -> None:
    groups = division.group_layers([16, None, 16, 100], 10, config())
    assert [(group.window_tokens, group.layers, group.bytes_per_token) for group in groups] == [
        (None, (1, 3), 20),
        (16, (0, 2), 20),
    ]
    assert not division.is_plain(groups)
    assert division.is_plain(division.group_layers([None, 64], 10, config()))


def test_the_knob_narrows_windows_layer_after_layer() -> None:
    groups = division.group_layers([None] * 5, 10, config(max_attention_window=[8, 64]))
    assert [(group.window_tokens, group.layers) for group in groups] == [(None, (1, 3)), (8, (0, 2, 4))]


def test_v1_divides_bytes_and_v2_gives_windows_what_any_batch_needs() -> None:
    layers = [16, None, 16, None]
    v1 = config()
    assert division.cache_cost(division.group_layers(layers, 10, v1), v1) == CacheCost(40)
    assert division.divide_blocks(16_000, division.group_layers(layers, 10, v1), v1) == (100, 100)
    v2 = config(kv_cache_manager="v2")
    groups = division.group_layers(layers, 10, v2)
    fixed = 2 * window_reach_blocks(16, 4) + (8 + 2)
    assert division.fixed_window_blocks(16, v2) == fixed == 20
    assert division.cache_cost(groups, v2) == CacheCost(20, fixed * 4 * 20)
    assert division.divide_blocks(16_000, groups, v2) == ((16_000 - 1600) // 20 // 4, fixed)
    assert division.step_slack(groups[1], fixed, v2) == 10
    ratio = v2.replace(pool_ratio=(0.25, 0.75))  # ascending windows: 16, then all
    assert division.divide_blocks(16_000, groups, ratio) == (150, 50)


def test_pools_of_a_worked_case() -> None:
    eight_gib = 8 * 2**30
    wide = config(max_seq_len=32_768, tokens_per_block=32)
    groups = division.group_layers([1024] * 20 + [None] * 4, 4096, wide)
    assert division.divide_blocks(eight_gib, groups, wide) == (8192, 1638)
    listed = division.ledger_groups(eight_gib, groups, wide)
    assert [(group.name, group.blocks, group.window, group.layers) for group in listed] == [
        ("full", 8192, None, 4),
        ("window 1024", 1638, 1024, 20),
    ]
    assert sum(group.bytes for group in listed) <= eight_gib


def test_a_windowed_pool_that_serves_no_request_is_refused_with_numbers() -> None:
    (_, windowed) = division.group_layers([16, None], 10, config())
    assert division.step_slack(windowed, 15, config()) == 10
    with pytest.raises(BudgetError, match=r"14 blocks .* takes 5 and the prompt pieces of a step 10"):
        division.step_slack(windowed, 14, config())


@given(
    kv_bytes=st.integers(20_000, 10**7),
    window=st.integers(1, 200),
    version=st.sampled_from(["v1", "v2"]),
    batch=st.integers(1, 8),
)
def test_pools_never_exceed_the_budget(kv_bytes: int, window: int, version: str, batch: int) -> None:
    settings = config(kv_cache_manager=version, max_batch_size=batch)
    groups = division.group_layers([window, None, window], 10, settings)
    if kv_bytes < division.cache_cost(groups, settings).bytes_for_tokens(settings.tokens_per_block):
        return
    blocks = division.divide_blocks(kv_bytes, groups, settings)
    used = sum(count * 4 * group.bytes_per_token for count, group in zip(blocks, groups, strict=True))
    assert used <= kv_bytes < used + sum(4 * group.bytes_per_token for group in groups) + len(groups) * 40


def test_what_one_request_returns_another_of_the_same_step_takes() -> None:
    kv = KVCacheManager(KVGroup(CountedStore(4, 4), window_tokens=4))
    taker, returner = request(0, 4, 9), request(1, 12, 9)
    step(kv, taker, 4)
    returner.chunk_tokens = 12
    kv.prepare(ScheduledBatch(context_last=[returner]))
    assert kv.free_blocks == 0
    returner.computed_tokens, returner.state, returner.output_token_ids = 12, RequestState.GENERATION, [1]
    kv.prepare(ScheduledBatch(generation=[taker, returner]))  # before the step that computed the prompt is settled
    assert (taker.id, kv.front_removed(returner), kv.free_blocks) == (0, 2, 0)
