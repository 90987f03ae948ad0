"""Devices: one contract (``base``), three implementations (``cuda``, ``host``, ``fake``), opened by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from onebudget.device.base import Device
    from onebudget.device.facts import DeviceFacts
    from onebudget.device.sample import MemorySample, PoolStats

__all__ = ["Device", "DeviceFacts", "MemorySample", "PoolStats", "device_kinds", "open_device"]

_OPENERS = {
    "host": ("onebudget.device.host", "HostDevice"),
    "fake": ("onebudget.device.fake", "FakeDevice"),
    "cuda": ("onebudget.device.cuda", "CudaDevice"),
}
_LAZY = {
    "Device": "onebudget.device.base",
    "DeviceFacts": "onebudget.device.facts",
    "MemorySample": "onebudget.device.sample",
    "PoolStats": "onebudget.device.sample",
}


def device_kinds() -> tuple[str, ...]:
    return tuple(_OPENERS)


def open_device(name: str, **options: Any) -> Device:
    """Open ``"host"`` or ``"fake"`` with ``capacity_bytes=...``, or ``"cuda:0"``.

    ``ConfigError`` for an unknown name or option; ``DeviceError`` where the machine lacks what the device needs.
    """
    kind, _, index = str(name).partition(":")
    if kind not in _OPENERS:
        raise ConfigError.for_field("device", name, f"one of {', '.join(_OPENERS)} (cuda takes an index: cuda:0)")
    if index and (kind != "cuda" or not index.isdigit()):
        raise ConfigError.for_field("device", name, "cuda:N with a number, or host or fake without one")
    if kind == "cuda":
        options["index"] = int(index or 0)
    elif not isinstance(options.get("capacity_bytes"), int):
        raise ConfigError.for_field("capacity_bytes", options.get("capacity_bytes"), f"an int for device {kind!r}")
    try:
        return _load(kind)(**options)  # type: ignore[no-any-return]
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise ConfigError(f"device {kind!r}: {error}") from error
        raise


def _load(kind: str) -> Any:
    module, attribute = _OPENERS[kind]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise DeviceError(
            f"device {kind!r} needs packages that are not here ({error}): install onebudget[{kind}] on a machine "
            f"with its driver",
            call="open_device",
        ) from error


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
