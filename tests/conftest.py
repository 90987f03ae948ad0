from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: one thread per worker, and no way to a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PIP_NO_INDEX"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from onebudget.models.demo import demo_model_dir, is_ready

# Timing is the machine's business. The default profile replays the same examples everywhere; `long` looks for new ones.
settings.register_profile(
    "default", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch finds none")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands that run in this process set logging up for all of it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the converted demo model; `make demo` puts it there, tests never fetch it."""
    folder = demo_model_dir()
    if not is_ready(folder):
        pytest.fail(f"the demo model is not in {folder}: run `make demo` once, with a network")
    return folder
