from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onebudget.planner.simulate import RooflineClock, SyntheticLoad, Trace, read_trace, synthetic_trace

PROJECT = Path(__file__).parents[4]
SYNTHETIC = SyntheticLoad(requests=2000, requests_per_s=20.0, turn_tokens=900, output_tokens=120, longest_tokens=12_000)


def recorded_trace(name: str) -> Path | None:
    """A recorded trace: in the folder that ONEBUDGET_TRACES names, or in a folder ``traces`` beside the project."""
    given = os.environ.get("ONEBUDGET_TRACES")
    folders = [Path(given)] if given else sorted(PROJECT.parent.glob("*/traces"))
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


@pytest.fixture(scope="session")
def first_of() -> Callable[[str, int], Trace]:
    """The first requests of a recorded trace, or as many of a synthetic one where it is not there."""

    def read(name: str, count: int) -> Trace:
        path = recorded_trace(name)
        return synthetic_trace(7, SYNTHETIC).first(count) if path is None else read_trace(path, limit=count)

    return read


@pytest.fixture
def clock() -> RooflineClock:
    """8 billion weights of 2 bytes on a card of 3,352 GB/s and 989 TFLOP/s."""
    return RooflineClock(
        gpu="H100-SXM-80GB",
        weight_bytes=16_060_522_496,
        flops_per_token=15_009_849_344,
        kv_bytes_per_token=131_072,
        flops_per_attended_pair=524_288,
        bandwidth_bytes_per_s=3_352_000_000_000,
        peak_flops=989.4e12,
    )
