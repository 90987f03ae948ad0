"""A host tier in a process that may lock no memory: it works, and one warning says so."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget.buffers import BufferManager
from onebudget.config import BudgetConfig
from onebudget.device import facts as facts_module
from onebudget.device import libc, open_device
from onebudget.device.facts import read_host_facts
from onebudget.engine.kv_cache import host_cache_bytes, lock_limit_cut
from onebudget.errors import DeviceError
from onebudget.resources.kv.host_tier import HostTier

MIB = 2**20
CHILD = """
import json, logging, resource, sys

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
from onebudget.device import libc

if libc.may_lock(4096):
    print(json.dumps({"locks": True}))
    sys.exit()
records = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("onebudget").addHandler(handler)
from onebudget import LLM, SamplingParams

folder, knobs = sys.argv[1], json.loads(sys.argv[2])
greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
prompts = [[5 + number] * 24 for number in range(4)]
with LLM(folder, dtype="fp32", device_memory="8MiB", max_seq_len=64, max_num_tokens=64, tokens_per_block=8,
         kv_cache_manager="v2", kv_max_tokens=80, enable_block_reuse=False, **knobs) as llm:
    alone = [llm.generate([prompt], greedy)[0].token_ids for prompt in prompts]
    together = [output.token_ids for output in llm.generate(prompts, greedy)]
    spill, kv = llm.engine.executor.kv.groups[0].blocks.spill, llm.engine.executor.kv
    print(json.dumps({
        "locks": False, "warnings": records, "same": alone == together, "suspended": kv.counters.suspended,
        "paused": llm.engine.executor.counters.paused, "limit": llm.engine.station.device.facts.memlock_limit_bytes,
        "pinned": None if spill is None else spill.near.tier.pinned,
    }))
"""


def unprivileged(folder: Path, **knobs: Any) -> dict[str, Any]:
    """What the child says that serves in a process without the right, and the limit, to lock memory."""
    command = [sys.executable, "-c", CHILD, str(folder), json.dumps(knobs)]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("root may always lock memory, and there is no setpriv to give that right up")
        command = [setpriv, "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if said["locks"]:
        pytest.skip("this machine lets every process lock memory")
    return said


def test_a_tier_of_a_given_size_is_used_unlocked(tiny: Callable[[str], Path]) -> None:
    said = unprivileged(tiny("gqa"), host_cache_bytes="1MiB")
    (warning,) = [text for text in said["warnings"] if "lock" in text]
    assert "pinned memory is not locked" in warning and "is 0 B" in warning
    assert (said["pinned"], said["limit"]) == (False, 0)
    assert said["suspended"] > 0
    assert said["same"]


@pytest.mark.long
def test_a_tier_that_nobody_asked_for_is_left_out_and_that_is_said(tiny: Callable[[str], Path]) -> None:
    said = unprivileged(tiny("gqa"))
    (warning,) = [text for text in said["warnings"] if "host tier" in text]
    assert "has 0 B instead of" in warning and "may lock 0 B" in warning
    assert (said["pinned"], said["suspended"]) == (None, 0)
    assert said["paused"] > 0
    assert said["same"]


# -- the limit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("may", "limit"), [(True, None), (False, 8 * MIB)])
def test_a_limit_that_does_not_hold_for_this_process_is_none(
    monkeypatch: pytest.MonkeyPatch, may: bool, limit: int | None
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(facts_module.resource, "getrlimit", lambda which: (8 * MIB, resource.RLIM_INFINITY))
    monkeypatch.setattr(libc, "may_lock", lambda nbytes: asked.append(nbytes) or may)
    assert read_host_facts().memlock_limit_bytes == limit
    assert asked == [8 * MIB + 4096]


def test_asking_takes_nothing() -> None:
    before = Path("/proc/self/status").read_text()
    libc.may_lock(2**40)
    assert not libc.may_lock(2**62)

    def line(text: str) -> str:
        return next(line for line in text.splitlines() if line.startswith("VmLck"))

    assert line(Path("/proc/self/status").read_text()) == line(before)


def test_what_the_limit_costs_is_said_in_numbers() -> None:
    config = BudgetConfig(kv_cache_manager="v2")
    with open_device("host", capacity_bytes=MIB) as device:
        limited = replace(device.facts, memlock_limit_bytes=10 * MIB, host_available_bytes=100 * MIB)
    assert host_cache_bytes(config, limited, 20 * MIB, 1) == 8 * MIB
    said = lock_limit_cut(config, limited, 20 * MIB, 1)
    assert said is not None and "8.00 MiB instead of 20.00 MiB" in said and "may lock 10.00 MiB" in said
    assert lock_limit_cut(config, limited, 8 * MIB, 1) is None
    assert lock_limit_cut(config.replace(host_cache_bytes=20 * MIB), limited, 20 * MIB, 1) is None
    assert lock_limit_cut(BudgetConfig(), limited, 20 * MIB, 1) is None
    assert lock_limit_cut(config, replace(limited, memlock_limit_bytes=None), 20 * MIB, 1) is None


def test_a_driver_that_can_not_lock_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second pool of a cache takes pageable memory from the start."""

    def refuse(*args: object, **owner: object) -> None:
        raise DeviceError("no", call="pinned")

    monkeypatch.setattr(BufferManager, "pinned", refuse)
    with open_device("host", capacity_bytes=MIB) as device, caplog.at_level(logging.WARNING):
        manager = BufferManager(device.create_stream())
        first = HostTier(manager, 2, 4096)
        second = HostTier(manager, 2, 4096, pinned=first.pinned)
        assert (first.pinned, second.pinned) == (False, False)
    assert len([record for record in caplog.records if "not page-locked" in record.message]) == 1
