"""The torch peak of vLLM's profiling run: the larger of the forward over T tokens and the sampler over R rows."""

from __future__ import annotations

from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.dims import Dims
from onebudget.planner.policies.drafts import Draft
from onebudget.planner.policies.formats import WeightFormat
from onebudget.planner.policies.indexer import IndexerRoom
from onebudget.planner.policies.versions import EngineVersion
from onebudget.planner.policies.vllm.compressed import profile_bytes_per_token, reserved_bytes
from onebudget.planner.policies.vllm.defaults import Limits
from onebudget.planner.policies.vllm.drafting import verifying_bytes_per_logit
from onebudget.planner.policies.weight_rules import VOCAB_PADDING, Shard
from onebudget.units import GIB, align_up

NATIVE_SORT = 38
"""Bytes per vocabulary entry and row of the sampler that sorts: rows in 16 and 32 bits, the sorted copy with its
indices, and the sort's scratch. A fit to printed peaks of V0 and of V1 to 0.10, of both halves of the cases."""
FUSED_KERNELS = 15
"""The same without a sort: Triton top-k/p from 0.17, FlashInfer from 0.21."""
V2_RUNNER = 6
"""The newer runner profiles its sampler without top-k and top-p: a row in 16 and one in 32 bits."""
HOLES_PERCENT = 40
"""Until 0.6.3 the peak is what the allocator had reserved, with its holes: 40 % above what was in use where a long
prompt runs whole (the even-id case with a printed length). One case: the range halves and doubles it."""
_TRITON_ROWS = 8
_FLASH_ATTENTION_SM = 80
"""Without FlashAttention one more hidden row per token is alive: the even-id case on such a card prints 5.3 kB a token
more than the formula, and its hidden row has 5.1 kB."""


def sampler_bytes_per_logit(version: EngineVersion, limits: Limits) -> int:
    """Bytes per row and vocabulary entry at the sampler's peak."""
    if limits.v2_runner:
        return V2_RUNNER
    if version.at_least(0, 21) or (version.at_least(0, 17) and limits.batch_requests >= _TRITON_ROWS):
        return FUSED_KERNELS
    return NATIVE_SORT


def profile_peak(
    dims: Dims,
    kind: WeightFormat,
    shard: Shard,
    limits: Limits,
    version: EngineVersion,
    *,
    sm: int | None = None,
    encodes: bool = True,
    room: IndexerRoom | None = None,
    draft: Draft | None = None,
) -> Figure:
    """Activation peak of the profiling run on one rank. ``sm``: the card's compute capability, as in 90; ``encodes``:
    whether encoders are profiled first; ``room``: what a scorer of tokens sets aside; ``draft``: what runs
    beside the model."""
    tokens = limits.batch_tokens
    rows = min(limits.batch_requests, tokens)
    factor = sampler_bytes_per_logit(version, limits)
    if draft is not None and draft.tokens:
        sorts = factor == NATIVE_SORT
        factor = max(factor, verifying_bytes_per_logit(version, newer_runner=limits.v2_runner, sorts=sorts))
    sampler = tokens * dims.hidden * 2 + factor * rows * align_up(dims.vocab, VOCAB_PADDING) if shard.has_head else 0
    forward = tokens * _forward_bytes_per_token(dims, kind, shard, tokens, version)
    if dims.compressed is not None:
        forward += reserved_bytes(dims.compressed, dims.head_dim, limits.max_len, tokens)
    if draft is not None:
        forward += tokens * dims.hidden * 2 * draft.read_rows
    if room is not None:
        choosing = tokens * 2 * (dims.heads // shard.tp * (dims.nope + dims.rope) + dims.hidden)
        forward = max(forward, choosing + room.passing) + room.kept
    if sm is not None and sm < _FLASH_ATTENTION_SM:
        forward += tokens * dims.hidden * 2
    if not version.at_least(0, 6, 4):
        forward = forward * (100 + HOLES_PERCENT) // 100
    kept = _encoder_bytes(dims, tokens) if encodes else 0
    encoder = dims.encoder.forward_bytes(tokens) if encodes and dims.encoder else 0
    peak = max(max(forward, sampler) + kept, encoder)
    why = (
        f"the larger of forward ({tokens} tokens, {forward / GIB:.2f} GiB) and sampler ({rows} rows of {dims.vocab} x "
        f"{factor} B, {sampler / GIB:.2f} GiB)" + (f", or an encoder ({encoder / GIB:.2f} GiB)" if encoder else "")
    )
    low, high = _bounds(peak, kept, version)
    if dims.compressed is not None and not limits.tokens_given:  # recipes set the tokens of a step to half or twice
        low, high = low - forward // 2, high + forward
    if not version.given:  # the sampler is what changed most between versions
        native = NATIVE_SORT * rows * align_up(dims.vocab, VOCAB_PADDING) if shard.has_head else 0
        low, high = min(low, forward), max(high, min(native, 2 * peak + GIB // 2))
    return Figure(peak, low, high + GIB // 20, "modelled", why)


def _bounds(peak: int, kept: int, version: EngineVersion) -> tuple[int, int]:
    """Printed peaks of text models lie this close; where holes count, the range halves and doubles their share."""
    if version.at_least(0, 6, 4):
        return peak * 95 // 100, peak * 106 // 100 + kept
    in_use = peak * 100 // (100 + HOLES_PERCENT)
    return in_use * (100 + HOLES_PERCENT // 2) // 100, in_use * (100 + 2 * HOLES_PERCENT) // 100


def _encoder_bytes(dims: Dims, tokens: int) -> int:
    """Encoder outputs stay alive beside the embeddings that take their place."""
    if not dims.multimodal:
        return 0
    return 2 * tokens * dims.hidden * 2


def _forward_bytes_per_token(dims: Dims, kind: WeightFormat, shard: Shard, tokens: int, version: EngineVersion) -> int:
    """Live bytes per token at the widest point of a layer: gate and up, their product, and three hidden rows."""
    if dims.compressed is not None:
        return profile_bytes_per_token(
            dims.compressed, hidden=dims.hidden, heads=dims.heads // shard.tp, head_dim=dims.head_dim,
            expert_bytes=_expert_bytes_per_token(dims, shard, tokens, version),
        )  # fmt: skip
    wide, hidden = (5, 4) if kind.fused else (6, 6)
    dense = wide * dims.intermediate // shard.tp + hidden * dims.hidden if not dims.experts or dims.dense_layers else 0
    latent = 0
    if dims.is_latent:
        latent = 2 * dims.heads // shard.tp * (2 * dims.nope + dims.rope + dims.v_head)
    return max(dense, latent, _expert_bytes_per_token(dims, shard, tokens, version))


_EXPERT_CHUNKS = (((0, 6), 65536), ((0, 12), 32768), ((0, 18), 16384))
"""Tokens that expert layers take at a time, by the version before which they do; all of them later."""


def _expert_bytes_per_token(dims: Dims, shard: Shard, tokens: int, version: EngineVersion) -> int:
    if not dims.experts:
        return 0
    width = dims.expert_intermediate if shard.whole_experts else dims.expert_intermediate // shard.experts_over
    outer = max(2 * width, dims.hidden) if version.at_least(0, 8) else 2 * width + dims.hidden  # shared from 0.8 on
    routed = dims.experts_per_token * (2 * outer + 2 * width)
    chunk = next((size for before, size in _EXPERT_CHUNKS if not version.at_least(*before)), tokens)
    return routed * min(tokens, chunk) // max(tokens, 1) + 6 * dims.hidden
