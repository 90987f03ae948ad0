from __future__ import annotations

import pytest

from onebudget.errors import ConfigError
from onebudget.graphs.engine_lists import (
    default_lists,
    sglang_graph_batch_sizes,
    trtllm_graph_batch_sizes,
    vllm_graph_batch_sizes,
)


@pytest.mark.parametrize(
    ("requests", "version", "count", "largest"),
    [
        (256, (0, 7, 3), 35, 256),
        (250, (0, 7, 3), 35, 256),
        (16, (0, 8, 4), 67, 512),
        (1024, (0, 9, 2), 67, 512),
        (256, (0, 10, 2), 67, 512),
        (128, (0, 11, 0), 35, 256),
        (256, (0, 11, 2), 51, 512),
        (1024, (0, 20, 0), 51, 512),
        (8, (0, 20, 0), 5, 16),
    ],
)
def test_vllm_by_version(requests: int, version: tuple[int, ...], count: int, largest: int) -> None:
    sizes = vllm_graph_batch_sizes(requests, version=version)
    assert (len(sizes), sizes[-1]) == (count, largest)
    assert sizes == sorted(set(sizes)) and sizes[:4] == [1, 2, 4, 8]


def test_vllm_decode_graphs_are_those_up_to_the_requests() -> None:
    for version in ((0, 11, 0), (0, 11, 2), (0, 31)):
        assert len([size for size in vllm_graph_batch_sizes(256, version=version) if size <= 256]) == 35


def test_vllm_limits_and_extras() -> None:
    assert vllm_graph_batch_sizes(256, max_num_batched_tokens=100)[-1] == 96
    assert vllm_graph_batch_sizes(1024, version=(0, 28), sm_100=True)[-1] == 1024
    assert vllm_graph_batch_sizes(1024, version=(0, 27), sm_100=True)[-1] == 512
    assert 100 in vllm_graph_batch_sizes(100, version=(0, 28)) and 100 not in vllm_graph_batch_sizes(
        100, version=(0, 27)
    )
    assert vllm_graph_batch_sizes(16, version=(0, 12), speculative_tokens=3)[-1] == 128
    assert {12, 60} <= set(vllm_graph_batch_sizes(16, version=(0, 28), speculative_tokens=3))


def test_sglang() -> None:
    sizes = sglang_graph_batch_sizes(512)
    assert sizes == [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512]
    assert len(sizes) == 52
    assert sglang_graph_batch_sizes(8) == [1, 2, 4, 8]
    assert sglang_graph_batch_sizes(600)[-2:] == [544, 576]


def test_trtllm() -> None:
    assert len(trtllm_graph_batch_sizes(128)) == 19
    assert (
        trtllm_graph_batch_sizes(256, step="x2")[-2:] == trtllm_graph_batch_sizes(512, step="x2")[-3:-1] == [128, 256]
    )


def test_lists_of_all_engines_stay_within_the_cap() -> None:
    lists = default_lists(256)
    assert {name: len(sizes) for name, sizes in lists.items()} == {
        "TensorRT-LLM +64": 21, "TensorRT-LLM x2": 20, "vLLM": 35, "SGLang": 36,
    }  # fmt: skip
    assert all(sizes[-1] == 256 for sizes in lists.values())


def test_nonsense() -> None:
    for wrong in (vllm_graph_batch_sizes, sglang_graph_batch_sizes, trtllm_graph_batch_sizes):
        with pytest.raises(ConfigError):
            wrong(-1)
