"""vLLM's pool: groups of layers, the price of a block, the blocks of a request and the token line of a version."""

from __future__ import annotations

from dataclasses import replace

from onebudget.budget.ledger import KVGroup
from onebudget.errors import ConfigError
from onebudget.planner.policies.compressed import CompressedShape
from onebudget.planner.policies.dims import Dims, LayerDims
from onebudget.planner.policies.ledgers import Pool
from onebudget.planner.policies.settings import switch, whole
from onebudget.planner.policies.vllm.case import Case, cached_bits
from onebudget.planner.policies.vllm.chosen import packed_latent
from onebudget.planner.policies.vllm.compressed import BLOCK_TOKENS as COMPRESSED_BLOCK
from onebudget.planner.policies.vllm.compressed import plan_compressed
from onebudget.planner.policies.vllm.groups import (
    CachedLayer,
    GroupPlan,
    cached_layers,
    plan_groups,
    printed_tokens,
    request_blocks,
)
from onebudget.planner.policies.weight_rules import Shard
from onebudget.units import ceil_div


def pool_of(case: Case, shard: Shard) -> Pool:
    """How the bytes of one stage become blocks and tokens."""
    if case.dims.compressed is not None:
        return _compressed_pool(case, case.dims.compressed)
    plan = _groups(case, shard)
    limits, version = case.limits, case.version
    aligned = limits.prefix_caching and case.dims.is_hybrid
    in_flight = limits.batch_tokens * (2 if version.at_least(0, 26) else 1)  # batches overlap, and both may hold blocks
    per_request = request_blocks(
        plan, limits.max_len, in_flight, aligned_states=aligned, draft_tokens=case.draft.tokens
    )
    alone = request_blocks(
        plan, limits.max_len, limits.batch_tokens, aligned_states=aligned, draft_tokens=case.draft.tokens
    )
    dcp = whole(case.settings, "decode_context_parallel_size", 1) or 1
    if case.request.layout.pp > 1 and not version.at_least(0, 17):  # one stage is charged with the layers of all
        per_request = ceil_div(per_request * len(case.dims.layers), max(sum(g.layers for g in plan.groups), 1))
    needed = (per_request + (1 if version.at_least(0, 29) else 0)) * plan.block_bytes

    def blocks(nbytes: int) -> int:
        return max(nbytes, 0) // plan.block_bytes

    def tokens(nbytes: int) -> int:
        return printed_tokens(plan, blocks(nbytes), per_request, limits.max_len, version) * dcp

    return Pool(
        tokens=tokens,
        blocks=blocks,
        tokens_per_block=plan.block_tokens,
        bytes_per_token=ceil_div(plan.block_bytes * _growing(plan), plan.block_tokens),
        fixed_bytes=sum(1 for group in plan.groups if group.kind == "state") * plan.block_bytes,
        concurrency=lambda nbytes: blocks(nbytes) / per_request,
        groups=lambda nbytes: _ledger_groups(plan, nbytes),
        needed_bytes=needed if limits.worker == "V1" else 1,
        token_factors=_unknown_modes(case, plan, per_request, alone),
    )


def _unknown_modes(case: Case, plan: GroupPlan, blocks: int, alone: int) -> tuple[float, float]:
    """How far tokens may be off because a log rarely says whether batches overlap, or which version's default for
    reusing states of hybrids holds. The token line is in longest requests from 0.20 on only."""
    if not case.version.at_least(0, 20):
        return 1.0, 1.0
    limits, costs = case.limits, [blocks, alone]
    if case.dims.is_hybrid and not case.version.given and "enable_prefix_caching" not in case.settings:
        costs += [
            request_blocks(
                plan, limits.max_len, limits.batch_tokens, aligned_states=mode, draft_tokens=case.draft.tokens
            )
            for mode in (False, True)
        ]
    return blocks / max(costs), blocks / min(costs)


def _compressed_pool(case: Case, shape: CompressedShape) -> Pool:
    limits = case.limits
    plan, half, twice = (
        plan_compressed(
            shape, case.dims.head_dim, case.version, length=limits.max_len, batch_tokens=tokens,
            draft_layers=len(case.draft.layers),
        )
        for tokens in (limits.batch_tokens, limits.batch_tokens // 2, limits.batch_tokens * 2)
    )  # fmt: skip
    fewest = 1.0 if limits.tokens_given else plan.request_blocks / twice.request_blocks

    def blocks(nbytes: int) -> int:
        return max(nbytes, 0) // plan.block_bytes

    return Pool(
        tokens=lambda nbytes: blocks(nbytes) * limits.max_len // plan.request_blocks,
        blocks=blocks,
        tokens_per_block=COMPRESSED_BLOCK,
        bytes_per_token=ceil_div(plan.block_bytes, COMPRESSED_BLOCK),
        fixed_bytes=(plan.needed_blocks - ceil_div(limits.max_len, COMPRESSED_BLOCK)) * plan.block_bytes,
        concurrency=lambda nbytes: blocks(nbytes) / plan.request_blocks,
        groups=lambda nbytes: _ledger_groups(plan.as_groups(), nbytes),
        needed_bytes=plan.needed_blocks * plan.block_bytes,
        token_factors=(fewest, plan.request_blocks / half.request_blocks),
    )


def _growing(plan: GroupPlan) -> int:
    return sum(1 for group in plan.groups if group.kind == "full") or 1


def _ledger_groups(plan: GroupPlan, nbytes: int) -> list[KVGroup]:
    blocks = nbytes // plan.block_bytes
    return [
        KVGroup(
            f"{group.kind}{index}", nbytes // len(plan.groups), blocks // len(plan.groups),
            plan.block_bytes // group.block_tokens, group.window, group.layers,
        )
        for index, group in enumerate(plan.groups)
    ]  # fmt: skip


def _groups(case: Case, shard: Shard) -> GroupPlan:
    dims, settings, version = case.dims, case.settings, case.version
    layers = _cached(case, dims, dims.layers[shard.first_layer : shard.end_layer], shard.tp)
    if shard.has_head:
        layers += _cached(case, case.draft.dims or dims, case.draft.layers, case.draft.ranks)
    if not layers:
        raise ConfigError("a pipeline stage without any cached layer can't be planned.", field="pp")
    windows = case.limits.worker == "V1" and version.at_least(0, 9)
    hybrid = windows and not switch(settings, "disable_hybrid_kv_cache_manager", default=False)
    block = 64 if dims.is_latent and (dims.is_hybrid or version.at_least(0, 8)) else 16
    if not dims.is_hybrid:
        block = whole(settings, "block_size", block) or block
    return plan_groups(layers, version, block_tokens=block, hybrid=hybrid)


def _cached(case: Case, dims: Dims, layers: tuple[LayerDims, ...], tp: int) -> list[CachedLayer]:
    version = case.version
    return cached_layers(
        replace(dims, layers=layers), cached_bits(case), tp, _state_elements(case), case.draft.tokens,
        latent_cache=version.at_least(0, 7), packed_bytes=packed_latent(case, tp),
        borrowed_keys=not version.at_least(0, 23),
    )  # fmt: skip


def _state_elements(case: Case) -> tuple[int, int]:
    """Element sizes of convolution window and state: settings, what the checkpoint asks for, or the model's own."""
    names = {"float32": 4, "float16": 2, "bfloat16": 2}
    own = case.dims.element_bytes
    asked = case.dims.state.matrix_bytes if case.dims.state else None
    if asked is None and case.dims.family.startswith("qwen3_5"):
        asked = 4  # the family's configs ask for 32 bits; partial ones leave it out
    ssm = names.get(str(case.settings.get("mamba_ssm_cache_dtype")), asked or own)
    return names.get(str(case.settings.get("mamba_cache_dtype")), own), ssm
