"""Keys of graphs: what they tell apart, how many tokens they hold, in which order they are captured."""

from __future__ import annotations

import pytest

from onebudget.graphs.keys import GraphKey, Tier, capture_order


@pytest.mark.parametrize(
    ("key", "beam_width", "tokens"),
    [
        (GraphKey(64, 3), 1, 256),
        (GraphKey(8, 3), 1, 32),
        (GraphKey(8, 3, num_contexts=3, context_query_len=5), 1, 3 * 5 + 5 * 4),
        (GraphKey(1), 1, 1),
        (GraphKey(4), 2, 8),
    ],
)
def test_tokens(key: GraphKey, beam_width: int, tokens: int) -> None:
    assert key.tokens(beam_width) == tokens


def test_the_same_shape_on_other_paths_is_another_graph() -> None:
    shape = GraphKey(8, 3)
    others = [
        shape._replace(all_greedy=False),
        shape._replace(adapter_dtype="bfloat16", use_adapter_graph=True),
        shape._replace(short_seq=True),
        shape._replace(tier=Tier.FAST),
        shape._replace(length_bucket=256),
    ]
    assert len({shape, *others}) == 6


def test_capture_goes_from_large_to_small() -> None:
    keys = {GraphKey(size, draft, tier=tier) for size in (1, 8, 4) for draft in (0, 3) for tier in Tier}
    keys.add(GraphKey(8, 3, use_adapter_graph=True))
    order = capture_order(keys)
    assert [key.batch_size for key in order] == sorted((key.batch_size for key in keys), reverse=True)
    assert order[0].use_adapter_graph
    assert [(key.draft_len, key.tier) for key in order[1:5]] == [(3, 0), (3, 1), (0, 0), (0, 1)]
