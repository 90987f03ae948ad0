"""Which KV manager a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.v2 import KVCacheManagerV2

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.resources.kv.group import KVGroup
    from onebudget.resources.kv.helix import HelixRank


def kv_manager(
    groups: Sequence[KVGroup], config: BudgetConfig, *, helix: HelixRank | None = None, **settings: Any
) -> KVCacheManager:
    """The manager over ``groups``, the same in the engine and in simulation; ``settings`` are its own.

    ``ConfigError`` for ``helix`` on v1, whose pool nothing sizes then.
    """
    if helix is not None and config.kv_cache_manager != "v2":
        raise ConfigError.for_field("kv_cache_manager", config.kv_cache_manager, "'v2' under helix context parallelism")
    settings |= {"reuse": config.enable_block_reuse, "helix": helix}
    if config.kv_cache_manager == "v2":
        return KVCacheManagerV2(groups, max_util_for_resume=config.max_util_for_resume_exact, **settings)
    return KVCacheManager(groups, **settings)
