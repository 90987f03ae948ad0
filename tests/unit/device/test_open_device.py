from __future__ import annotations

import subprocess
import sys

import pytest

from onebudget import device as device_package
from onebudget.device import device_kinds, open_device
from onebudget.errors import ConfigError, DeviceError


def test_kinds() -> None:
    assert device_kinds() == ("host", "fake", "cuda")


@pytest.mark.parametrize("name", ["tpu", "", "host:0", "cuda:x", "fake:1", None, 3])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ConfigError):
        open_device(name, capacity_bytes=1 << 20)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capacity_bytes": None},
        {"capacity_bytes": "1GiB"},
        {"capacity_bytes": 0},
        {"capacity_bytes": -1},
        {"capacity_bytes": 1 << 20, "granularity_bytes": 1000},
        {"capacity_bytes": 1 << 20, "granularity_bytes": -4096},
        {"capacity_bytes": 1 << 20, "others_bytes": 1 << 21},
        {"capacity_bytes": 1 << 20, "others_bytes": -1},
        {"capacity_bytes": 1 << 20, "colour": "red"},
    ],
)
@pytest.mark.parametrize("name", ["host", "fake"])
def test_unusable_options(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        open_device(name, **options)


def test_host_granules_are_pages() -> None:
    with pytest.raises(ConfigError, match="page"):
        open_device("host", capacity_bytes=1 << 20, granularity_bytes=512)


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_package._OPENERS, "cuda", ("onebudget.device.no_such_module", "CudaDevice"))
    with pytest.raises(DeviceError, match=r"onebudget\[cuda\]"):
        open_device("cuda:0")


def test_names_of_fake_cards_are_kept() -> None:
    with open_device("fake", capacity_bytes=80 * 10**9, gpu="H100-SXM-80GB") as device:
        assert (device.name, device.kind, device.torch_device) == ("H100-SXM-80GB", "fake", "meta")


def test_lazy_names() -> None:
    assert device_package.MemorySample.__name__ == "MemorySample"
    with pytest.raises(AttributeError):
        device_package.Nothing  # noqa: B018


def test_books_need_no_torch() -> None:
    code = """
import sys
from onebudget.device import open_device
from onebudget.buffers import BufferManager, virtual_memory_scope, release_with_tag
for kind in ("host", "fake"):
    with open_device(kind, capacity_bytes=1 << 20) as device:
        manager = BufferManager(device.create_stream())
        with virtual_memory_scope("kv", "cpu"):
            buffer = manager.gpu((4, 5), "bfloat16")
        release_with_tag("kv")
        buffer.release()
        manager.set_zero(manager.gpu(100))
        assert device.sample().alloc_peak
assert not {"torch", "numpy", "cuda"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
