"""One memory budget for language-model inference that adds up to the byte, and an engine that runs inside it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Imported on first use, so that planning works where torch is not installed.
_HOMES = {
    "AgreementError": "errors",
    "AllocationError": "errors",
    "BaseResourceManager": "resources.base",
    "BudgetConfig": "config",
    "BudgetError": "errors",
    "BufferManager": "buffers",
    "CacheCost": "budget.cost",
    "CapacityError": "errors",
    "ConfigError": "errors",
    "DeviceError": "errors",
    "KVCacheManager": "resources.kv.manager",
    "LLM": "engine.llm",
    "Ledger": "budget.ledger",
    "MemorySample": "device.sample",
    "ModelError": "errors",
    "NoFreeSlotsError": "errors",
    "OneBudgetError": "errors",
    "ProfileResult": "budget.profile",
    "RequestError": "errors",
    "RequestOutput": "core",
    "ReserveLine": "budget.reserves",
    "ResourceManager": "resources.manager",
    "SamplingParams": "core",
    "StateError": "errors",
    "StreamChunk": "engine.llm",
    "UnknownKeyError": "errors",
    "UseAfterFreeError": "errors",
    "derive_budget": "budget.derive",
    "open_device": "device",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onebudget' has no attribute {name!r}")
    value = getattr(import_module(f"onebudget.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
