"""Layouts that no engine starts with: heads or layers that the ranks can't share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import ConfigError
from onebudget.planner.rank_config import check_heads

if TYPE_CHECKING:
    from onebudget.planner.policies.base import PlanRequest
    from onebudget.planner.policies.dims import Dims


def refuse_layout(request: PlanRequest, dims: Dims, *, attention_ranks: int | None = None) -> None:
    """``ConfigError`` where the ranks can't divide the heads, where stages outnumber layers, or where there are fewer
    cards than ranks.

    ``attention_ranks``: ranks that share the heads of one request, ``tp`` where nothing else is said. Latent attention
    caches one latent for all heads, so only its query heads count.
    """
    tp, pp = request.layout.tp, request.layout.pp
    if dims.heads:
        kv_heads = dims.heads if dims.is_latent else dims.kv_heads or dims.heads
        check_heads(dims.heads, kv_heads, attention_ranks or tp, dims.name)
    if pp > len(dims.layers):
        raise ConfigError(f"pp = {pp} is more than the model's {len(dims.layers)} layers.", field="pp", value=pp)
    if tp * pp > request.n_gpus:
        raise ConfigError(f"tp {tp} x pp {pp} needs {tp * pp} GPUs, there are {request.n_gpus}.", field="n_gpus")
