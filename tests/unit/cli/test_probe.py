from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onebudget.cli.cpu import dtype_features
from onebudget.device.facts import DeviceFacts

Invoke = Callable[..., Any]


def test_every_fact_of_the_host_has_a_value_and_a_source(invoke: Invoke) -> None:
    result = invoke("probe", "--device", "host", "--json")
    assert (result.status, result.err) == (0, "")
    (host,) = json.loads(result.out)["devices"]
    names = {field.name for field in dataclasses.fields(DeviceFacts)} - {"sources"}
    assert names | {"free_bytes", "cpu_dtype_features"} == set(host["facts"])
    assert all(fact["source"] for fact in host["facts"].values())
    assert host["facts"]["memlock_limit_bytes"]["source"] == "getrlimit(RLIMIT_MEMLOCK)"


def test_the_table_shows_them_for_people(invoke: Invoke) -> None:
    text = invoke("probe", "--device", "host").out
    for word in ("granularity_bytes", "pool_supported", "cgroup_limit_bytes", "unified", "wsl", "mig", "/proc/meminfo"):
        assert word in text


@pytest.mark.parametrize("name", ["hots", "gpu", ""])
def test_an_unknown_device_is_status_2(invoke: Invoke, name: str) -> None:
    result = invoke("probe", "--device", name)
    assert (result.status, result.out) == (2, "")
    assert result.paragraph


def test_cpu_features_come_from_the_flags_line(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16 f16c\nbogus: avx512f\n")
    assert dtype_features(file) == (["avx2", "f16c", "amx_bf16"], str(file))
    file.write_text("Features\t: fp asimdhp bf16\n")
    assert dtype_features(file)[0] == ["asimdhp", "bf16"]
    assert dtype_features(tmp_path / "none")[0] == []
