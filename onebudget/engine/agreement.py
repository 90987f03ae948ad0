"""What ranks must have in common before they serve together: settings, and the tokens their caches hold."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from onebudget.budget.cost import CacheCost
from onebudget.budget.ranks import agree_on_quotas, agreed_ledger
from onebudget.errors import AgreementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onebudget.budget.ledger import Ledger
    from onebudget.config import BudgetConfig
    from onebudget.engine.ranks import RankGroup
    from onebudget.models.facts import ModelFacts

_OWN_KNOBS = {"device_memory", "free_gpu_memory_fraction", "max_gpu_total_bytes", "kv_max_tokens"}
"""They only say how much memory a rank has to offer; everything else shapes the steps, which all ranks do alike."""


def agree_on_settings(ranks: RankGroup, config: BudgetConfig, facts: ModelFacts, dtype: str) -> None:
    """``AgreementError`` naming what differs between the ranks and must not."""
    knobs = {name: value for name, value in config.to_dict().items() if name not in _OWN_KNOBS}
    every = ranks.gather({**knobs, "dtype": dtype, "the model": facts})
    differing = [name for name in every[0] if any(each[name] != every[0][name] for each in every)]
    if differing:
        values = "; ".join(f"{name} is {_by_rank(name, every)}" for name in differing)
        raise AgreementError(f"ranks must be started alike, but {values}.")


def _by_rank(name: str, every: Sequence[Mapping[str, object]]) -> str:
    return ", ".join(f"{each[name]} on rank {rank}" for rank, each in enumerate(every))


def agree_on_ledger(ranks: RankGroup, ledger: Ledger, config: BudgetConfig) -> Ledger:
    """This rank's ledger once all ranks hold the same tokens; the ledger as it is for a process alone."""
    if not ranks.shared:
        return ledger
    pool = ledger.kv_cache
    cost = CacheCost(pool.bytes_per_token, pool.fixed_bytes)
    every = ranks.gather((pool.bytes, cost, ledger.capacity_bytes, ledger.admission.attended_tokens_cap))
    quotas, costs, capacities, caps = zip(*every, strict=True)
    share = config.max_util_for_resume_exact if config.kv_cache_manager == "v2" else Fraction(1)
    agreed = agreed_ledger(
        ledger,
        agree_on_quotas(quotas, costs, share),
        rank=ranks.rank,
        quotas=quotas,
        capacities=capacities,
        attended_tokens_caps=caps,
        blocks_per_max_request=config.blocks_per_max_request,
    )
    return agreed.replace(notes=(*agreed.notes, _COMMUNICATION_NOTES.get(ledger.device.kind, _BESIDE_ALLOCATOR)))


_BESIDE_ALLOCATOR = "Buffers of the exchange between ranks are outside the framework's allocator: context holds them."
_COMMUNICATION_NOTES = {
    "host": "Buffers of the exchange between ranks are ordinary memory of the process, outside the declared device: no "
    "communication term."
}
