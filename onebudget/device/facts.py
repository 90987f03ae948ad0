"""What is known about a card before anything runs on it, and where each fact was read."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

from onebudget.device import libc


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts of one device. Sizes in bytes; ``None`` means unknown or, for a limit, that there is none.

    ``granularity_bytes`` is the unit in which physical memory is handed out; ``os_page_bytes`` the page of the
    operating system. ``sources`` names, per field, where the value was read.
    """

    name: str
    total_bytes: int
    granularity_bytes: int
    os_page_bytes: int
    pool_supported: bool
    vmm_supported: bool
    multicast_supported: bool = False
    unified: bool = False
    wsl: bool = False
    mig: bool = False
    driver: str | None = None
    memlock_limit_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    host_total_bytes: int | None = None
    host_available_bytes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    def source(self, name: str) -> str:
        """Where ``name`` was read; ``"assumed"`` when nobody said."""
        return self.sources.get(name, "assumed")


class HostFields(TypedDict):
    """The fields of ``DeviceFacts`` that are about the machine around the device."""

    os_page_bytes: int
    host_total_bytes: int | None
    host_available_bytes: int | None
    memlock_limit_bytes: int | None
    cgroup_limit_bytes: int | None
    wsl: bool


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the operating system says about this machine's memory. Limits are ``None`` when there is none."""

    os_page_bytes: int
    total_bytes: int | None
    available_bytes: int | None
    memlock_limit_bytes: int | None
    cgroup_limit_bytes: int | None
    cgroup_source: str
    wsl: bool

    def as_device_fields(self) -> HostFields:
        return {
            "os_page_bytes": self.os_page_bytes,
            "host_total_bytes": self.total_bytes,
            "host_available_bytes": self.available_bytes,
            "memlock_limit_bytes": self.memlock_limit_bytes,
            "cgroup_limit_bytes": self.cgroup_limit_bytes,
            "wsl": self.wsl,
        }

    def sources(self) -> dict[str, str]:
        return {
            "os_page_bytes": "sysconf(SC_PAGE_SIZE)",
            "host_total_bytes": "/proc/meminfo MemTotal",
            "host_available_bytes": "/proc/meminfo MemAvailable",
            "memlock_limit_bytes": "getrlimit(RLIMIT_MEMLOCK)",
            "cgroup_limit_bytes": self.cgroup_source,
            "wsl": "/proc/sys/kernel/osrelease",
        }


def read_host_facts() -> HostFacts:
    """Read page size, memory, the page-locking limit and the tightest control-group limit. Never raises."""
    meminfo = _read_meminfo()
    limit, source = read_cgroup_limit()
    return HostFacts(
        os_page_bytes=mmap.PAGESIZE,
        total_bytes=meminfo.get("MemTotal"),
        available_bytes=meminfo.get("MemAvailable"),
        memlock_limit_bytes=_read_memlock_limit(),
        cgroup_limit_bytes=limit,
        cgroup_source=source,
        wsl="microsoft" in _read_text("/proc/sys/kernel/osrelease").lower(),
    )


def read_cgroup_limit() -> tuple[int | None, str]:
    """The smallest memory limit from this process's control group up to the root, and the file that says so.

    Understands the unified hierarchy (``memory.max``) and the older one (``memory.limit_in_bytes``, where a number
    near 2**63 means no limit).
    """
    best: tuple[int | None, str] = (None, "no control-group limit found")
    for file in _cgroup_limit_files():
        text = _read_text(file).strip()
        limit = int(text) if text.isdigit() else None
        if limit is not None and limit < 2**60 and (best[0] is None or limit < best[0]):
            best = (limit, str(file))
    return best


def _cgroup_limit_files() -> list[Path]:
    files: list[Path] = []
    for line in _read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [Path("/sys/fs/cgroup/memory")], "memory.limit_in_bytes"
        else:
            continue
        for root in roots:
            leaf = root / path.lstrip("/")
            files += [folder / name for folder in (leaf, *leaf.parents) if folder.is_relative_to(root)]
    return files


def _read_meminfo() -> dict[str, int]:
    pairs = (line.split(":", 1) for line in _read_text("/proc/meminfo").splitlines() if ":" in line)
    values = {name: rest.split() for name, rest in pairs}
    return {name: int(words[0]) * 1024 for name, words in values.items() if words and words[-1] == "kB"}


def _read_memlock_limit() -> int | None:
    """The limit on locked memory; None where there is none, or it does not hold for this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    beyond = soft + mmap.PAGESIZE
    return None if soft == resource.RLIM_INFINITY or libc.may_lock(beyond // mmap.PAGESIZE * mmap.PAGESIZE) else soft


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
