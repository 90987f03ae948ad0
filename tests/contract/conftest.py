"""Devices for the contract suite: the same tests on every implementation that this machine can open."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onebudget.buffers import BufferManager, memory_counters
from onebudget.buffers.virtual import config_stack, virtual_memory_manager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.units import MIB

MakeDevice = Callable[..., Device]


def _open(kind: str, **options: Any) -> Device:
    if kind != "cuda":
        return open_device(kind, **{"capacity_bytes": 64 * MIB, **options})
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none")
    if options:
        pytest.skip("the books of a CUDA device belong to its driver; this test shapes them")
    return open_device("cuda:0")


@pytest.fixture(params=["host", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def any_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """One device of every kind."""
    with _open(request.param) as device:
        yield device


@pytest.fixture(params=["host", "fake"])
def make_device(request: pytest.FixtureRequest) -> Iterator[MakeDevice]:
    """A function that opens host or fake devices with options; they close at the end of the test."""
    opened: list[Device] = []

    def make(**options: Any) -> Device:
        opened.append(_open(request.param, **options))
        return opened[-1]

    yield make
    for device in opened:
        device.close()


@pytest.fixture
def device(make_device: MakeDevice) -> Device:
    """A 64 MiB host or fake device."""
    return make_device()


@pytest.fixture
def manager(device: Device) -> BufferManager:
    return BufferManager(device.create_stream())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a test did, the process-wide registries are as before."""
    before = memory_counters.snapshot()
    yield
    assert len(config_stack) == 0
    assert virtual_memory_manager().tags() == {}
    assert virtual_memory_manager().take_bad_handles() == []
    if memory_counters.snapshot() != before:
        gc.collect()  # frames of expected errors may still hold buffers
    assert all(nbytes <= before[kind] for kind, nbytes in memory_counters.snapshot().items())
