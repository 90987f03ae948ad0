"""A simulation of one rank of a helix group, which is the rank with the most to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.resources.kv.helix import HelixRank

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig


def first_rank(cp_size: int) -> HelixRank | None:
    """Rank 0 of a group; None where there is nobody to share with. ``ConfigError`` for fewer than one rank."""
    rank = HelixRank(cp_size, 0)
    return rank if cp_size > 1 else None


def rank_config(config: BudgetConfig, helix: HelixRank | None) -> BudgetConfig:
    """The settings of a rank: the v2 manager unless another one was asked for, and no reuse of prefixes."""
    if helix is None:
        return config
    manager = config.kv_cache_manager if "kv_cache_manager" in config.given else "v2"
    return config.replace(kv_cache_manager=manager, enable_block_reuse=False)


def rank_notes(helix: HelixRank) -> tuple[str, ...]:
    """What the numbers stand for."""
    return (
        f"Blocks are those of rank 0 of {helix.cp_size} ranks that share the tokens of every request (helix context "
        "parallelism). It keeps at least as much of each request as any other rank, so with equal pools whatever it "
        "serves the others serve too. Requests and tokens are those of the whole group.",
        "Step times are those of one card that does the work of the whole group: neither what the ranks share nor "
        "what they exchange is counted.",
        "Under helix no prefixes are reused, and paused requests are computed again rather than suspended.",
    )
