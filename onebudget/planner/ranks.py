"""The ranks of a plan beside each other: ranks of one stage are alike, stages differ in layers, tables and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.budget.ledger import RankLine
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.formats import weight_format
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.policies.base import PlanRequest
    from onebudget.planner.policies.dims import Dims


def rank_table(request: PlanRequest, ledger: Ledger) -> tuple[tuple[RankLine, ...], int]:
    """A line for each rank, and the rank that limits the pool; no lines where there is one rank.

    The ledger is of the limiting rank. Another stage has what its weights leave, and pays for its own layers only.
    """
    layout = request.layout
    if layout.ranks == 1:
        return (), 0
    stages = _stage_layers(len(dims_from_config(request.model.config).layers), layout.pp)
    weights = [_stage_weights(request, first, end) for first, end in stages]
    tightest = max(range(layout.pp), key=lambda stage: (weights[stage], stages[stage][1] - stages[stage][0]))
    pool, per_stage = ledger.kv_cache, layout.tp * layout.dp
    lines = []
    for stage, (first, end) in enumerate(stages):
        share = max(1, end - first) / max(1, stages[tightest][1] - stages[tightest][0])
        kv_bytes = max(0, pool.bytes + weights[tightest] - weights[stage]) if pool.bytes else 0
        agreed = min(int(pool.bytes * share), kv_bytes)
        tokens = int(pool.tokens * kv_bytes / max(1, agreed)) if agreed else pool.tokens
        for each in range(per_stage):
            rank = stage * per_stage + each
            lines.append(
                RankLine(
                    rank=rank, capacity_bytes=ledger.capacity_bytes, kv_bytes=kv_bytes, tokens=tokens,
                    agreed_kv_bytes=agreed,
                )
            )  # fmt: skip
    limiting = min(lines, key=lambda line: (line.tokens or 0, line.rank)).rank
    return tuple(lines), limiting


def _stage_layers(count: int, pp: int) -> list[tuple[int, int]]:
    """First and end layer of each stage: even, and what is left over goes to the first."""
    each, rest = divmod(count, pp)
    ends = [sum(each + (stage < rest) for stage in range(upto + 1)) for upto in range(pp)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _stage_weights(request: PlanRequest, first: int, end: int) -> int:
    dims: Dims = dims_from_config(request.model.config, request.model.name)
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    layout = request.layout
    shard = Shard(
        tp=layout.tp, experts_over=max(layout.tp, layout.ep), whole_experts=layout.ep > 1, first_layer=first,
        end_layer=end, has_embedding=first == 0, has_head=end == len(dims.layers), vision=first == 0,
    )  # fmt: skip
    return weights_on_rank(dims, kind, shard).bytes
