"""vLLM's KV cache groups: layers of unlike kinds share one pool of equal pages.

Layers of one kind make one group and a block costs the sum of their pages. Otherwise pages are made equal, layers are
dealt out in groups of equal size (with padding layers), and every group draws blocks from the same pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from onebudget.planner.policies.dims import Dims, LayerDims, LayerKind
from onebudget.planner.policies.versions import EngineVersion
from onebudget.units import align_up, ceil_div

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's cache on one rank: bytes per token, or bytes of a state; a window in tokens where it has one."""

    kind: LayerKind
    token_bytes: int = 0
    state_bytes: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that hold blocks together. ``kind`` and ``window`` say how many blocks a request of some length takes."""

    kind: LayerKind
    layers: int
    block_tokens: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """``block_bytes``: what one block id costs over all layers that share it."""

    groups: tuple[Group, ...]
    block_bytes: int
    block_tokens: int
    padding_layers: int = 0


def cached_layers(
    dims: Dims,
    bits: Fraction,
    tp: int,
    state_bytes: tuple[int, int],
    draft_tokens: int,
    *,
    latent_cache: bool = True,
    packed_bytes: int = 0,
    borrowed_keys: bool = False,
) -> list[CachedLayer]:
    """Every layer's cache on one rank; layers that share another's cache own nothing. ``state_bytes``: element sizes of
    the convolution window and the state; drafts lengthen the window by ``draft_tokens`` rows.

    Of models whose attention is chosen by a scorer: ``packed_bytes`` is what a token's latent takes where it is stored
    with scales (0: by ``bits``), ``borrowed_keys`` whether layers that borrow their choice keep a scorer's keys.
    """
    layers = []
    for layer in dims.layers:
        if layer.kind == "shared":
            continue
        if layer.kind == "state":
            layers.append(CachedLayer("state", state_bytes=_state_bytes(dims, tp, state_bytes, draft_tokens)))
            continue
        elements = layer.latent if latent_cache else _expanded(dims, layer, tp)
        elements = elements or max(1, layer.kv_heads // tp) * (layer.k_dim + layer.v_dim)
        nbytes = packed_bytes if packed_bytes and layer.index_bytes else int(elements * bits / 8)
        keys = layer.index_bytes if borrowed_keys or not layer.borrows_index else 0
        layers.append(CachedLayer(layer.kind, nbytes + keys, window=layer.window))
    return layers


def _expanded(dims: Dims, layer: LayerDims, tp: int) -> int:
    """Latent attention without a cache of its own: every head, with widths padded to what kernels take."""
    return dims.heads // tp * 2 * align_up(dims.nope + dims.rope, 128) if layer.latent else 0


def _state_bytes(dims: Dims, tp: int, element_bytes: tuple[int, int], draft_tokens: int) -> int:
    state = dims.state
    if state is None:
        return 0
    rows = state.conv_rows + draft_tokens
    return state.conv_width // tp * rows * element_bytes[0] + state.matrix // tp * element_bytes[1]


def plan_groups(
    layers: Sequence[CachedLayer], version: EngineVersion, *, block_tokens: int = BLOCK_TOKENS, hybrid: bool = True
) -> GroupPlan:
    """Groups and the price of a block. ``hybrid`` False: windows are charged as full attention."""
    if not hybrid:
        layers = [_as_full(layer) for layer in layers]
    kinds = Counter((layer.kind, layer.window) for layer in layers)
    if len(kinds) == 1:
        block = sum(layer.token_bytes for layer in layers) * block_tokens or sum(layer.state_bytes for layer in layers)
        (kind, window), count = next(iter(kinds.items()))
        return GroupPlan((Group(kind, count, block_tokens, window),), block, block_tokens)
    return _mixed(layers, version, block_tokens)


def _as_full(layer: CachedLayer) -> CachedLayer:
    return CachedLayer("full", layer.token_bytes) if layer.kind in ("sliding", "chunked") else layer


def _mixed(layers: Sequence[CachedLayer], version: EngineVersion, block_tokens: int) -> GroupPlan:
    attention = [layer for layer in layers if layer.kind != "state"]
    widest = max(layer.token_bytes for layer in attention)
    state = max((layer.state_bytes for layer in layers), default=0)
    if state:
        block_tokens = block_tokens * max(1, ceil_div(state, block_tokens * widest))
    page = block_tokens * widest
    types: Counter[tuple[LayerKind, int | None, int]] = Counter()
    for layer in layers:
        tokens = page // layer.token_bytes if layer.token_bytes and page % layer.token_bytes == 0 else block_tokens
        types[layer.kind, layer.window, tokens] += 1
    size = _group_size(list(types.values()), version)
    groups, padding = [], 0
    for (kind, window, tokens), count in types.items():
        padding += align_up(count, size) - count
        groups += [Group(kind, size, tokens, window)] * ceil_div(count, size)
    return GroupPlan(tuple(groups), size * page, min(group.block_tokens for group in groups), padding)


def _group_size(counts: list[int], version: EngineVersion) -> int:
    """Fewest layers of any kind; where the kinds are nearly alike, the most (one padded group each)."""
    least, most = min(counts), max(counts)
    if version.at_least(0, 18):
        near = 2 * most < 3 * least
    else:
        near = version.at_least(0, 12) and 4 * most < 5 * least
    return most if near else least


def request_blocks(plan: GroupPlan, length: int, batch_tokens: int, *, aligned_states: bool, draft_tokens: int) -> int:
    """Blocks that one request of ``length`` tokens holds at most, over all groups."""
    total = 0
    for group in plan.groups:
        if group.kind == "state":
            total += (2 if aligned_states else 1) + draft_tokens
        elif group.kind == "sliding" and group.window:
            total += ceil_div(min(group.window - 1 + batch_tokens, length), group.block_tokens) + 1
        elif group.kind == "chunked" and group.window:
            total += ceil_div(min(group.window + batch_tokens, length), group.block_tokens)
        else:
            total += ceil_div(length, group.block_tokens)
    return max(total, 1)


def printed_tokens(plan: GroupPlan, blocks: int, per_request: int, max_len: int, version: EngineVersion) -> int:
    """The figure of the token line: blocks shared out over the groups, and from 0.20.1 on the tokens of as many longest
    requests as fit at once."""
    if len(plan.groups) == 1:
        return blocks * plan.block_tokens
    if version.at_least(0, 20, 1) and not (version.number == (0, 20, 1) and version.candidate):
        return blocks * max_len // per_request
    return blocks // len(plan.groups) * plan.block_tokens
