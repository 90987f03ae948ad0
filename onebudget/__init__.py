"""One memory budget for language-model inference that adds up to the byte, and an engine that runs inside it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebudget.budget.context_workspace import context_kv_len_cap as context_kv_len_cap
    from onebudget.budget.context_workspace import context_workspace_reserve as context_workspace_reserve
    from onebudget.budget.cost import CacheCost as CacheCost
    from onebudget.budget.derive import derive_budget as derive_budget
    from onebudget.budget.late import LateAllocation as LateAllocation
    from onebudget.budget.ledger import Ledger as Ledger
    from onebudget.budget.profile import ProfileResult as ProfileResult
    from onebudget.budget.reserves import ReserveLine as ReserveLine
    from onebudget.budget.reserves import indexer_logits_bytes as indexer_logits_bytes
    from onebudget.budget.reserves import penalty_workspace_bytes as penalty_workspace_bytes
    from onebudget.budget.split import split_budget as split_budget
    from onebudget.buffers import Buffer as Buffer
    from onebudget.buffers import BufferManager as BufferManager
    from onebudget.buffers import MemoryKind as MemoryKind
    from onebudget.buffers.virtual import materialize_with_tag as materialize_with_tag
    from onebudget.buffers.virtual import release_with_tag as release_with_tag
    from onebudget.buffers.virtual import virtual_memory_scope as virtual_memory_scope
    from onebudget.config import BudgetConfig as BudgetConfig
    from onebudget.core import RequestOutput as RequestOutput
    from onebudget.core import SamplingParams as SamplingParams
    from onebudget.device import open_device as open_device
    from onebudget.device.base import Device as Device
    from onebudget.device.sample import MemorySample as MemorySample
    from onebudget.device.sample import PoolStats as PoolStats
    from onebudget.engine.llm import LLM as LLM
    from onebudget.engine.session import StreamChunk as StreamChunk
    from onebudget.errors import AgreementError as AgreementError
    from onebudget.errors import AllocationError as AllocationError
    from onebudget.errors import BudgetError as BudgetError
    from onebudget.errors import CapacityError as CapacityError
    from onebudget.errors import ConfigError as ConfigError
    from onebudget.errors import DeviceError as DeviceError
    from onebudget.errors import ModelError as ModelError
    from onebudget.errors import NoFreeSlotsError as NoFreeSlotsError
    from onebudget.errors import OneBudgetError as OneBudgetError
    from onebudget.errors import RequestError as RequestError
    from onebudget.errors import StateError as StateError
    from onebudget.errors import UnknownKeyError as UnknownKeyError
    from onebudget.errors import UseAfterFreeError as UseAfterFreeError
    from onebudget.graphs.buckets import default_graph_batch_sizes as default_graph_batch_sizes
    from onebudget.graphs.buckets import filter_graph_batch_sizes as filter_graph_batch_sizes
    from onebudget.graphs.buckets import resolve_graph_batch_sizes as resolve_graph_batch_sizes
    from onebudget.graphs.plan_buckets import plan_buckets as plan_buckets
    from onebudget.graphs.runner import CUDAGraphRunner as CUDAGraphRunner
    from onebudget.planner.plan import plan as plan
    from onebudget.resources.base import BaseResourceManager as BaseResourceManager
    from onebudget.resources.kv.manager import KVCacheManager as KVCacheManager
    from onebudget.resources.kv.v2 import KVCacheManagerV2 as KVCacheManagerV2
    from onebudget.resources.manager import ResourceManager as ResourceManager
    from onebudget.workspace.policy import WorkspaceShrinkPolicy as WorkspaceShrinkPolicy
    from onebudget.workspace.reclaim import EagerWorkspaceReclaimer as EagerWorkspaceReclaimer

# Imported on first use, so that planning works where torch is not installed.
_HOMES = {
    "AgreementError": "errors",
    "AllocationError": "errors",
    "BaseResourceManager": "resources.base",
    "BudgetConfig": "config",
    "BudgetError": "errors",
    "Buffer": "buffers",
    "BufferManager": "buffers",
    "CUDAGraphRunner": "graphs.runner",
    "CacheCost": "budget.cost",
    "CapacityError": "errors",
    "ConfigError": "errors",
    "Device": "device.base",
    "DeviceError": "errors",
    "EagerWorkspaceReclaimer": "workspace.reclaim",
    "KVCacheManager": "resources.kv.manager",
    "KVCacheManagerV2": "resources.kv.v2",
    "LLM": "engine.llm",
    "LateAllocation": "budget.late",
    "Ledger": "budget.ledger",
    "MemoryKind": "buffers",
    "MemorySample": "device.sample",
    "ModelError": "errors",
    "NoFreeSlotsError": "errors",
    "OneBudgetError": "errors",
    "PoolStats": "device.sample",
    "ProfileResult": "budget.profile",
    "RequestError": "errors",
    "RequestOutput": "core",
    "ReserveLine": "budget.reserves",
    "ResourceManager": "resources.manager",
    "SamplingParams": "core",
    "StateError": "errors",
    "StreamChunk": "engine.session",
    "UnknownKeyError": "errors",
    "UseAfterFreeError": "errors",
    "WorkspaceShrinkPolicy": "workspace.policy",
    "context_kv_len_cap": "budget.context_workspace",
    "context_workspace_reserve": "budget.context_workspace",
    "default_graph_batch_sizes": "graphs.buckets",
    "derive_budget": "budget.derive",
    "filter_graph_batch_sizes": "graphs.buckets",
    "indexer_logits_bytes": "budget.reserves",
    "materialize_with_tag": "buffers.virtual",
    "open_device": "device",
    "penalty_workspace_bytes": "budget.reserves",
    "plan": "planner.plan",
    "plan_buckets": "graphs.plan_buckets",
    "release_with_tag": "buffers.virtual",
    "resolve_graph_batch_sizes": "graphs.buckets",
    "split_budget": "budget.split",
    "virtual_memory_scope": "buffers.virtual",
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
