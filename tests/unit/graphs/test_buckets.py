from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.errors import ConfigError
from onebudget.graphs.buckets import (
    bucket_for,
    chosen_graph_batch_sizes,
    default_encoder_lengths,
    default_encoder_token_sizes,
    default_graph_batch_sizes,
    encoder_padding_allowed,
    filter_graph_batch_sizes,
    hit_rate,
    padded_share,
    padded_tokens,
    resolve_graph_batch_sizes,
)

UP_TO_128 = [1, 2, 4, *range(8, 129, 8)]
SIZES = st.lists(st.integers(1, 300), max_size=12)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, [1]),
        (6, [1, 2, 4, 6]),
        (50, [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]),
        (128, UP_TO_128),
        (None, UP_TO_128),
        (0, UP_TO_128),
        (300, [*UP_TO_128, 192, 256, 300]),
        (512, [*UP_TO_128, *range(192, 513, 64)]),
    ],
)
def test_defaults_with_padding(largest: int | None, expected: list[int]) -> None:
    assert default_graph_batch_sizes(largest) == expected


@pytest.mark.parametrize(
    ("largest", "step", "count"),
    [
        (128, "+64", 19), (300, "+64", 22), (512, "+64", 25), (1024, "+64", 33), (2048, "+64", 49),
        (512, "x2", 21), (1024, "x2", 22), (2048, "x2", 23), (128, "x2", 19),
    ],
)  # fmt: skip
def test_how_many_graphs_each_step_takes(largest: int, step: str, count: int) -> None:
    assert len(default_graph_batch_sizes(largest, step=step)) == count


def test_defaults_without_padding_are_dense_where_batches_are_small() -> None:
    assert default_graph_batch_sizes(50, padding=False) == [*range(1, 33), 50]
    assert default_graph_batch_sizes(300, padding=False) == [*range(1, 33), 64, 128, 256, 300]
    assert default_graph_batch_sizes(257, padding=False)[-2:] == [256, 257]
    assert default_graph_batch_sizes(256, padding=False)[-2:] == [128, 256]
    assert len(default_graph_batch_sizes(50, padding=False)) == 33
    assert len(default_graph_batch_sizes(300, padding=False)) == 36


@pytest.mark.parametrize(
    ("largest", "step", "share"),
    [
        (512, "+64", "8.7 %"), (512, "x2", "23.9 %"), (1024, "+64", "5.2 %"), (1024, "x2", "24.7 %"),
        (2048, "+64", "2.8 %"), (2048, "x2", "24.9 %"),
    ],
)  # fmt: skip
def test_share_of_padding_under_uniform_load(largest: int, step: str, share: str) -> None:
    uniform = dict.fromkeys(range(1, largest + 1), 1.0)
    assert f"{100 * padded_share(default_graph_batch_sizes(largest, step=step), uniform):.1f} %" == share


@pytest.mark.parametrize(("live", "every_64th", "doubled"), [(257, 320, 512), (1025, 1088, 2048), (2049, None, None)])
def test_what_a_batch_is_padded_to(live: int, every_64th: int | None, doubled: int | None) -> None:
    assert bucket_for(default_graph_batch_sizes(2048), live) == every_64th
    assert bucket_for(default_graph_batch_sizes(2048, step="x2"), live) == doubled


@given(st.integers(1, 4096), st.booleans(), st.sampled_from(["+64", "x2"]))
def test_defaults_ascend_to_the_largest(largest: int, padding: bool, step: str) -> None:
    sizes = default_graph_batch_sizes(largest, padding=padding, step=step)
    assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == largest


def test_wrong_arguments_of_the_defaults() -> None:
    for wrong in (-1, True, 2.5):
        with pytest.raises(ConfigError):
            default_graph_batch_sizes(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'x2'"):
        default_graph_batch_sizes(64, step="x3")


def test_a_users_list() -> None:
    assert chosen_graph_batch_sizes([8, 1, 4]) == [1, 4, 8]
    assert chosen_graph_batch_sizes([8, 1, 4], max_batch_size=8, draft_thresholds=(3, 8, 9)) == [1, 3, 4, 8]
    with pytest.raises(ConfigError, match="0 or 8"):
        chosen_graph_batch_sizes([8, 1, 4], max_batch_size=16)
    for wrong in ([], [0, 4]):
        with pytest.raises(ConfigError):
            chosen_graph_batch_sizes(wrong)


@pytest.mark.parametrize(
    ("sizes", "batch", "tokens", "per_request", "padding", "expected"),
    [
        ([1, 2, 4, 8], 8, 3000, 1500, False, [1, 2]),
        ([1, 2, 4, 8], 8, 1499, 1500, True, []),
        ([1, 2, 4, 8], 6, 10000, 1, True, [1, 2, 4, 6]),
        ([1, 2, 4, 8], 4, 10000, 1, True, [1, 2, 4]),
        ([16, 32], 8, 1000, 1, True, [8]),
        ([16, 32], 8, 1000, 1, False, []),
        ([8, 1, 4], 8, 1000, 1, True, [1, 4, 8]),
    ],
)
def test_filter(
    sizes: list[int], batch: int, tokens: int, per_request: int, padding: bool, expected: list[int]
) -> None:
    found = filter_graph_batch_sizes(
        sizes, max_batch_size=batch, max_num_tokens=tokens, tokens_per_request=per_request, padding=padding
    )
    assert found == expected


@given(SIZES, st.integers(0, 300), st.integers(0, 2000), st.integers(1, 9), st.booleans())
def test_filter_stays_inside_and_changes_nothing_twice(
    sizes: list[int], batch: int, tokens: int, per_request: int, padding: bool
) -> None:
    def filtered(given: list[int]) -> list[int]:
        return filter_graph_batch_sizes(
            given, max_batch_size=batch, max_num_tokens=tokens, tokens_per_request=per_request, padding=padding
        )

    once = filtered(sizes)
    assert all(size <= min(batch, tokens // per_request) for size in once)
    assert filtered(once) == once == sorted(set(once))


def test_a_cut_list_is_told(caplog: pytest.LogCaptureFixture) -> None:
    filter_graph_batch_sizes([1, 8], max_batch_size=6, max_num_tokens=99, tokens_per_request=1, padding=True)
    assert "6 is captured in place of 8" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "limit", "pad_to_limit", "expected"),
    [
        ((1, 2, 4, 8), 6, True, (1, 2, 4, 6)),
        ((1, 2, 4), 6, True, (1, 2, 4)),
        ((8,), 6, True, (6,)),
        ((8,), 6, False, ()),
        ((1, 2, 4, 8), 4, True, (1, 2, 4)),
        ((1, 2), 0, True, ()),
    ],
)
def test_resolve(sizes: tuple[int, ...], limit: int, pad_to_limit: bool, expected: tuple[int, ...]) -> None:
    assert resolve_graph_batch_sizes(sizes, limit, pad_to_limit=pad_to_limit) == expected


def test_encoder_lists() -> None:
    tokens = default_encoder_token_sizes(8192)
    assert len(tokens) == 22
    assert tokens == [1, 2, 4, 8, 16, 32, 64, 128, *range(256, 3073, 256), 4096, 8192]
    assert default_encoder_token_sizes(3000)[-2:] == [2816, 3000]
    assert default_encoder_token_sizes(4096)[-2:] == [3072, 4096]
    assert default_encoder_lengths(5000) == [1, 2, 4, 8, 16, 32, 64, *range(128, 1025, 128), 2048, 4096, 5000]
    assert default_encoder_lengths(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_encoder_features_are_padded_by_an_eighth_at_most() -> None:
    assert encoder_padding_allowed(64, 72)
    assert not encoder_padding_allowed(64, 73)


def test_padding_counts_only_what_meets_a_graph() -> None:
    histogram = {3: 2.0, 4: 1.0, 9: 1.0}
    assert padded_tokens([4, 8], histogram) == 2
    assert padded_share([4, 8], histogram) == 2 / (6 + 4 + 2)
    assert hit_rate([4, 8], histogram) == 0.75
    assert (padded_tokens([], histogram), padded_share([], histogram), hit_rate([], histogram)) == (0, 0, 0)
    assert hit_rate([4], {}) == 0
