"""Managers that turn the byte budget into countable things and lend them to requests at fixed moments of a step."""

from onebudget.resources.base import BaseResourceManager, ResourceKind
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.v2 import KVCacheManagerV2
from onebudget.resources.manager import ResourceManager
from onebudget.resources.slots import SequenceSlotManager
from onebudget.resources.units import BlocksDelta, BlocksTotal

__all__ = [
    "BaseResourceManager",
    "BlocksDelta",
    "BlocksTotal",
    "KVCacheManager",
    "KVCacheManagerV2",
    "ResourceKind",
    "ResourceManager",
    "SequenceSlotManager",
]
