from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onebudget.buffers import BufferManager, MemoryKind, memory_counters
from onebudget.device import libc, open_device
from onebudget.device.host_multicast import HostMulticast
from onebudget.errors import AgreementError, AllocationError, ConfigError, DeviceError
from onebudget.units import MIB

SCRIPT = Path(__file__).with_name("nvls_ranks.py")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """What two real processes saw."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda report: report["rank"])


@pytest.mark.parametrize("name", ["shared", "again"])
def test_ranks_see_the_same_bytes_at_the_same_address(reports: list[dict[str, Any]], name: str) -> None:
    first, second = (report[name] for report in reports)
    assert first["address"] == second["address"] != 0
    assert first["fresh"]
    assert second["fresh"]
    assert first["seen"] == second["seen"] == [1, 2]
    assert second["after"] == [1, 2]
    assert first["held"] == second["held"] == [8000, 8192]


@pytest.mark.parametrize("call", ["shape", "dtype", "ranks", "other_ranks"])
def test_unequal_calls_are_refused_on_all_ranks(reports: list[dict[str, Any]], call: str) -> None:
    assert [report["errors"][call] for report in reports] == ["AgreementError", "AgreementError"]


def test_a_call_that_is_wrong_on_one_rank_fails_all(reports: list[dict[str, Any]]) -> None:
    assert [report["errors"]["bad_dtype"] for report in reports] == ["ConfigError", "AgreementError"]


def test_a_full_card_fails_all_ranks(reports: list[dict[str, Any]]) -> None:
    assert [report["errors"]["one_rank_full"] for report in reports] == ["AgreementError", "AllocationError"]


def test_nothing_is_left(reports: list[dict[str, Any]]) -> None:
    assert [report["left"] for report in reports] == [[0, 0], [0, 0]]


def test_one_process_is_a_group_of_one() -> None:
    with open_device("host", capacity_bytes=8 * MIB) as device:
        manager = BufferManager(device.create_stream())
        before = memory_counters.current(MemoryKind.NVLS)
        with manager.ipc_nvls({0}, (3, 5), "float32") as buffer:
            assert buffer.kind is MemoryKind.NVLS
            assert buffer.as_tensor().tolist() == [[0.0] * 5] * 3
            assert device.used_bytes() == 4096
            assert memory_counters.current(MemoryKind.NVLS) - before == 60
        with manager.ipc_nvls({0}, 0) as empty:
            assert empty.data_ptr == 0
        with pytest.raises(AgreementError):
            manager.ipc_nvls({0, 1}, 4)
        with pytest.raises(AllocationError):
            manager.ipc_nvls({0}, 9 * MIB)
        assert device.used_bytes() == 0
        for ranks in ([], {-1}, None, {"a"}):
            with pytest.raises(ConfigError, match="ranks"):
                manager.ipc_nvls(ranks, 4)  # type: ignore[arg-type]


def test_a_device_that_can_not_share_says_so() -> None:
    with open_device("fake", capacity_bytes=8 * MIB) as device:
        with pytest.raises(DeviceError, match="multicast"):
            BufferManager(device.create_stream()).ipc_nvls({0}, 4)
        with pytest.raises(DeviceError, match="multicast"):
            device.make_multicast()


def test_an_address_in_use_is_left_alone() -> None:
    multicast = HostMulticast()
    multicast.create(4096)
    address = multicast.propose_address(0)
    taken = libc.mmap(address, 4096, libc.PROT_NONE, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS)
    assert taken == address
    assert not multicast.try_map(address)
    assert multicast.try_map(multicast.propose_address(1))
    multicast.close()
    multicast.close()
    libc.munmap(taken, 4096)


def test_joining_a_process_that_is_gone() -> None:
    with pytest.raises(DeviceError, match="one machine"):
        HostMulticast().join((2**22 + 1, 3), 4096)
