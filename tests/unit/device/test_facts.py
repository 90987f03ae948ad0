from __future__ import annotations

import dataclasses
import mmap
import resource
from pathlib import Path

import pytest

from onebudget.device import facts as facts_module
from onebudget.device import open_device
from onebudget.device.facts import read_cgroup_limit, read_host_facts


def test_this_machine() -> None:
    facts = read_host_facts()
    assert facts.os_page_bytes == mmap.PAGESIZE
    assert facts.total_bytes is not None
    assert facts.available_bytes is not None
    assert 0 < facts.available_bytes <= facts.total_bytes
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert facts.memlock_limit_bytes in (None, soft), "none, where it does not hold for this process"


def test_facts_are_frozen_with_sources() -> None:
    with open_device("host", capacity_bytes=1 << 20) as device:
        assert device.facts.source("memlock_limit_bytes") == "getrlimit(RLIMIT_MEMLOCK)"
        assert device.facts.source("total_bytes") == "capacity_bytes given to open_device"
        assert device.facts.source("driver") == "assumed"
        with pytest.raises(dataclasses.FrozenInstanceError):
            device.facts.mig = True  # type: ignore[misc]
        with pytest.raises(TypeError):
            device.facts.sources["mig"] = "x"  # type: ignore[index]


def tree(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(facts_module, "_read_text", lambda path: files.get(str(path), ""))


def test_the_tightest_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tree(monkeypatch, {
        "/proc/self/cgroup": "0::/outer/inner\n",
        "/sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "/sys/fs/cgroup/outer/memory.max": "2000000\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
    })  # fmt: skip
    assert read_cgroup_limit() == (2000000, "/sys/fs/cgroup/outer/memory.max")


def test_the_older_hierarchy_and_its_number_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/cgroup": "9:cpu:/x\n4:memory:/job\n"}
    leaf = str(Path("/sys/fs/cgroup/memory/job/memory.limit_in_bytes"))
    tree(monkeypatch, {**files, leaf: "9223372036854771712"})
    assert read_cgroup_limit()[0] is None
    tree(monkeypatch, {**files, leaf: "4096000"})
    assert read_cgroup_limit() == (4096000, leaf)


def test_without_any_file_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tree(monkeypatch, {})
    facts = read_host_facts()
    assert (facts.cgroup_limit_bytes, facts.total_bytes, facts.wsl) == (None, None, False)
    tree(monkeypatch, {"/proc/sys/kernel/osrelease": "5.15.1-microsoft-standard-WSL2"})
    assert read_host_facts().wsl
