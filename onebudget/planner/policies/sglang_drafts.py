"""SGLang and drafts: a second runner whose pool holds as many tokens as the model's.

From 0.5.15 on it is loaded before the pool is sized, and its layers are part of a token's price; before, it lived in
what the fraction leaves. Read in the sources of 0.4.6.post5 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onebudget.planner.policies.drafts import (
    Draft,
    DraftKind,
    draft_weights,
    find_draft,
    head_draft,
    model_draft,
    module_draft,
    module_layer,
)
from onebudget.planner.policies.settings import whole

if TYPE_CHECKING:
    from onebudget.planner.policies.base import Figure, PlanRequest
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.policies.formats import WeightFormat
    from onebudget.planner.policies.versions import EngineVersion
    from onebudget.planner.policies.vllm.groups import CachedLayer

SEATS = 48
"""Requests at once where drafts are on and nothing else was asked."""
_BLOCKS = ("DFLASH", "DSPARK")
_TREE = ("llama", "grok")
_DRAFTED, _DRAFTED_IN_TREES = 4, 8


def read_draft(settings: Mapping[str, Any], request: PlanRequest, dims: Dims, ranks: int) -> Draft:
    """The draft that ``speculative_algorithm`` asks for. Raises ``ModelError`` for a draft model that nobody knows."""
    algorithm = str(settings.get("speculative_algorithm") or "").upper()
    if not algorithm:
        return Draft()
    tokens = _tokens(settings, algorithm, dims)
    path = str(settings.get("speculative_draft_model_path") or "")
    if algorithm == "NGRAM":
        return Draft(method=algorithm, tokens=tokens)
    if path in ("", request.model.name):
        return module_draft(dims, method=algorithm, tokens=tokens, ranks=ranks, modules=max(dims.draft_layers, 1))
    source = find_draft(path, request, needed=algorithm == "STANDALONE")
    if algorithm == "STANDALONE" and source is not None:
        return model_draft(source, method=algorithm, tokens=tokens, ranks=ranks)
    kind: DraftKind = "eagle3" if algorithm == "EAGLE3" else "block" if algorithm in _BLOCKS else "eagle"
    draft = head_draft(dims, source, kind=kind, method=algorithm, tokens=tokens, ranks=ranks)
    modules = draft.dims.draft_layers if draft.dims is not None else 0
    if modules:  # a checkpoint of modules says so in the model's own config
        return module_draft(dims, method=algorithm, tokens=tokens, ranks=ranks, modules=modules)
    return draft


def _tokens(settings: Mapping[str, Any], algorithm: str, dims: Dims) -> int:
    """Tokens verified at once: as asked, one more than steps without a tree, or by family."""
    asked = whole(settings, "speculative_num_draft_tokens")
    steps = whole(settings, "speculative_num_steps")
    if steps and (whole(settings, "speculative_eagle_topk", 1) or 1) == 1 and algorithm not in _BLOCKS:
        return steps + 1
    trees = dims.family.startswith(_TREE) and algorithm != "STANDALONE"
    return asked or (_DRAFTED_IN_TREES if trees else _DRAFTED)


def is_charged(version: EngineVersion) -> bool:
    """Whether the draft is loaded before the pool is sized."""
    return version.at_least(0, 5, 15)


def reserve_mib(algorithm: str, version: EngineVersion) -> int:
    """What the default fraction leaves free for a draft."""
    if not algorithm or is_charged(version):
        return 0
    if not version.at_least(0, 5, 3):
        return 2048
    if algorithm in ("NGRAM", "STANDALONE"):
        return 6144 if algorithm == "STANDALONE" else 0
    return 4096 if version.at_least(0, 5, 12) else 2048


def head_weights(draft: Draft, dims: Dims, kind: WeightFormat) -> Figure | None:
    """Bytes of a draft with a checkpoint of its own; an embedding as wide as the model's is the model's."""
    return draft_weights(draft, dims, kind, own_tables=False)


def draft_cell_bytes(
    draft: Draft, dims: Dims, layers: Sequence[CachedLayer], own: Sequence[CachedLayer], version: EngineVersion
) -> int:
    """What the draft adds to a token's price on one rank; 0 where its pool lives in what the fraction leaves.

    Its layers are taken to be like the model's, whatever they are, but for blocks from 0.5.18 on; a scorer's keys count
    for each of its layers. ``layers`` are the model's, ``own`` the draft's as they are.
    """
    blocks = draft.kind == "block"
    if not own or not (is_charged(version) or (blocks and version.at_least(0, 5, 12))):
        return 0
    if blocks and version.at_least(0, 5, 18):
        return sum(layer.token_bytes for layer in own)
    alike = [layer.token_bytes for layer in layers if layer.kind == "full"] or [layer.token_bytes for layer in layers]
    keys = [layer.index_bytes for layer in dims.layers if not layer.borrows_index or not version.at_least(0, 5, 18)]
    latents = sum(alike) - sum(keys)
    return latents * len(own) // max(len(alike), 1) + len(own) * module_layer(dims).index_bytes
