"""TensorRT-LLM and drafts: layers of the model's own cache manager, or a second manager beside it.

One engine adds the draft's layers to those of the last stage; two managers that size themselves from bytes divide the
pool so that both hold as many tokens. Read in the sources of the PyTorch backend, two states from 2025 and 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onebudget.budget.cost import CacheCost
from onebudget.budget.split import split_budget
from onebudget.planner.policies.drafts import (
    Draft,
    find_draft,
    head_draft,
    model_draft,
    module_draft,
    read_mapping,
)
from onebudget.planner.policies.settings import switch, whole

if TYPE_CHECKING:
    from onebudget.planner.policies.base import PlanRequest
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.policies.versions import EngineVersion

_WITHOUT_CACHE = ("ngram", "lookahead", "userprovided", "savehiddenstates", "sa", "auto", "medusa")


def read_draft(settings: Mapping[str, Any], request: PlanRequest, dims: Dims, version: EngineVersion) -> Draft:
    """The draft that ``speculative_config`` asks for by its ``decoding_type``. Raises ``ModelError`` for a draft model
    that nobody knows."""
    config = read_mapping("speculative_config", settings.get("speculative_config"), "decoding_type")
    kind = str(config.get("decoding_type") or "").lower().replace("_", "")
    modules = whole(config, "num_nextn_predict_layers", 1) or 1
    tokens = whole(config, "max_draft_len", modules) or modules
    ranks = request.layout.tp
    if not kind or kind in _WITHOUT_CACHE:
        return Draft(method=kind, tokens=tokens if kind else 0)
    if kind == "mtp":
        return module_draft(dims, method=kind, tokens=tokens, ranks=ranks, modules=_modules(config, modules, version))
    path = str(config.get("speculative_model_dir") or config.get("speculative_model") or "")
    own = kind in ("drafttarget", "pard")
    source = find_draft(path, request, needed=own) if path else None
    if own and source is not None:
        return model_draft(source, method=kind, tokens=tokens, ranks=ranks)
    return head_draft(dims, source, kind="eagle3" if kind.startswith("eagle") else "block", method=kind,
                      tokens=tokens, ranks=ranks)  # fmt: skip


def _modules(config: Mapping[str, Any], asked: int, version: EngineVersion) -> int:
    """Modules with a cache: as many as are asked for; from 1.2 on one that runs again and again, unless each is to be a
    module of its own."""
    if version.at_least(1, 2) and not switch(config, "use_mtp_vanilla", default=False):
        return 1
    return asked


def has_own_manager(draft: Draft, config: Any) -> bool:
    """Whether the draft's cache has a manager of its own: a model by itself, or a head in an engine of its own."""
    given = read_mapping("speculative_config", config, "decoding_type")
    two = draft.kind in ("eagle3", "block") and not switch(given, "eagle3_one_model", default=True)
    return draft.kind == "model" or two


def target_share(usable: int, slope: int, draft_slope: int) -> int:
    """What is left to the model of a pool that a draft's manager shares."""
    if not draft_slope or usable <= 0:
        return usable
    return split_budget(usable, CacheCost(slope=slope), CacheCost(slope=draft_slope))[0]
