"""The meter and several ranks: DTensors, and what an exchange holds on to. One process is a group of one here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from onebudget.device import Device, open_device
from onebudget.device.meter import StorageMeter
from onebudget.units import MIB


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=64 * MIB) as opened:
        yield opened


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def held(device: Device) -> int:
    return device.sample().alloc_live


def test_operations_inside_a_dtensor_are_charged(device: Device) -> None:
    mesh = init_device_mesh("cpu", (1,))
    table = DTensor.from_local(torch.zeros(1024, 64), mesh, [Shard(0)], run_check=False)
    ids = DTensor.from_local(torch.arange(256), mesh, [Replicate()], run_check=False)
    with StorageMeter(device):
        found = torch.nn.functional.embedding(ids, table)
        assert isinstance(found, DTensor)
        assert held(device) == 256 * 64 * 4
        local = found.redistribute(placements=[Replicate()]).to_local()
        del found
        assert local.shape == (256, 64)
        assert held(device) == 256 * 64 * 4
        del local
        assert held(device) == 0


def test_wrappers_and_shapes_are_not_memory(device: Device) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with StorageMeter(device):
        plain = torch.ones(512)
        wrapped = DTensor.from_local(plain, mesh, [Replicate()], run_check=False)
        shapes = torch.empty(10_000, device="meta")
        assert (wrapped.numel(), shapes.numel()) == (512, 10_000)
        assert held(device) == 2048


def test_on_a_fake_device_meta_tensors_are_the_memory() -> None:
    with open_device("fake", capacity_bytes=64 * MIB) as device, StorageMeter(device):
        shapes = torch.empty(10_000, device="meta")
        assert held(device) == 40_448  # 40,000 B in whole 512 B
        del shapes
        assert held(device) == 0


def test_an_exchange_in_place_charges_nothing_and_lets_go_at_once(device: Device) -> None:
    with StorageMeter(device):
        tensor = torch.full((1024,), 3.0)
        dist.all_reduce(tensor)
        assert held(device) == 4096
        assert tensor.sum() == 3 * 1024
        del tensor
        assert held(device) == 0


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_the_result_of_an_exchange_is_charged_and_lets_go_at_once(device: Device, operation: str) -> None:
    functional, name = torch.ops._c10d_functional, dist.group.WORLD.group_name  # type: ignore[union-attr]
    with StorageMeter(device):
        tensor = torch.arange(1024.0)
        if operation == "all_reduce":
            result = functional.all_reduce(tensor, "sum", name)
        else:
            result = functional.all_gather_into_tensor(tensor, 1, name)
        assert torch.equal(functional.wait_tensor(result), tensor)
        assert held(device) == 2 * 4096
        del tensor, result
        assert held(device) == 0
