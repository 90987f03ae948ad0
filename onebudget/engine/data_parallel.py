"""Attention data parallelism over a group of processes: requests of their own, forwards in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onebudget.errors import AgreementError
from onebudget.scheduling.agreement import AttentionDataParallel

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.engine.ranks import RankGroup
    from onebudget.resources import KVCacheManager


def attention_data_parallel(ranks: RankGroup, kv: KVCacheManager) -> AttentionDataParallel:
    """Agreement between the ranks of a group, with dummies of this rank's cache. A rank that is lost in the middle of a
    step ends all of them, by the group's own watch."""

    def gather(name: str, value: Any) -> Sequence[Any]:
        with ranks.guard(name):
            found = ranks.gather((name, value))
            if any(other != name for other, _ in found):
                raise AgreementError(f"ranks stand at different exchanges of a step: {[other for other, _ in found]}")
            return [each for _, each in found]

    def make_dummies(ids: list[int]) -> list[Request] | None:
        return kv.add_dummy_requests(ids, generation=True, tokens=2)

    return AttentionDataParallel(gather, make_dummies)
