"""vLLM and drafts: which one ``speculative_config`` asks for, what of it a rank holds, and what verifying takes.

Read in the sources of 0.9.2, 0.11.0, 0.13.0, 0.15.1, 0.17.1, 0.19.1, 0.22.1, 0.25.1, 0.28.0 and 0.31.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError
from onebudget.planner.policies.drafts import (
    Draft,
    DraftKind,
    draft_weights,
    find_draft,
    head_draft,
    model_draft,
    module_draft,
    read_mapping,
)
from onebudget.planner.policies.settings import whole

if TYPE_CHECKING:
    from onebudget.planner.policies.base import Figure, PlanRequest
    from onebudget.planner.policies.dims import Dims
    from onebudget.planner.policies.versions import EngineVersion
    from onebudget.planner.policies.vllm.case import Case
    from onebudget.planner.source import ModelSource

_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "custom_class", "medusa", "mlp_speculator", "extract_hidden_states")
_OWN_OUTPUT = ("deepseek", "glm4_moe", "glm_moe", "pangu", "kimi_k2", "step3p5")
"""Families whose modules have an output table of their own, which versions before 0.17 keep."""
_BORROWS_CACHE = "gemma4_assistant"


def read_draft(settings: Mapping[str, Any], request: PlanRequest, dims: Dims, version: EngineVersion) -> Draft:
    """The draft that ``speculative_config`` asks for: a mapping, the same as JSON, or the method alone.

    Raises ``ConfigError`` for ranks that can't divide it, and ``ModelError`` for a draft model that nobody knows.
    """
    config = read_mapping("speculative_config", settings.get("speculative_config"), "method")
    if not config:
        return Draft()
    name = str(config.get("model") or "")
    tokens = whole(config, "num_speculative_tokens") or 0
    ranks = request.layout.tp
    method = str(config.get("method") or "").lower().strip("[]") or _method_of_name(name)
    if method in _WITHOUT_CACHE:
        return Draft(method=method, tokens=tokens or 1)
    if method.endswith("mtp") and name in ("", request.model.name):
        draft = module_draft(dims, method="mtp", tokens=tokens, ranks=ranks)
        return replace(draft, tokens=tokens or draft.modules)
    source = find_draft(name, request, needed=method in ("", "draft_model")) if name else None
    method = method or _method_of(source)
    if method == "draft_model" and source is not None:
        ranks = _draft_ranks(config, request.layout.tp, version)
        return model_draft(source, method=method, tokens=tokens or 1, ranks=ranks)
    return _head(dims, source, method=method, tokens=tokens or 1, ranks=ranks)


def _method_of_name(name: str) -> str:
    """What a checkpoint's name says of its kind, as the engine reads it; empty where it says nothing."""
    plain = name.lower()
    if plain in ("", "ngram"):
        return plain
    marks = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"), ("mtp", "mtp"))
    return next((method for mark, method in marks if mark in plain), "")


def _method_of(source: ModelSource | None) -> str:
    words = "" if source is None else f"{source.config.get('architectures')} {source.config.get('model_type')}".lower()
    marks = (("eagle3", "eagle3"), ("eagle", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"),
             ("assistant", "mtp"), ("mtp", "mtp"), ("medusa", "medusa"))  # fmt: skip
    return next((method for mark, method in marks if mark in words), "draft_model")


def _draft_ranks(config: Mapping[str, Any], tp: int, version: EngineVersion) -> int:
    """Ranks that divide a draft model: the first core lets one rank have all of it, later ones do not."""
    ranks = whole(config, "draft_tensor_parallel_size", tp) or tp
    first_core = not version.at_least(0, 8) or version.worker == "V0"
    if ranks not in ((1, tp) if first_core else (tp,)):
        allowed = f"1 or {tp}" if first_core else f"{tp}, as tensor_parallel_size"
        raise ConfigError.for_field("draft_tensor_parallel_size", ranks, allowed)
    return ranks


def _head(dims: Dims, source: ModelSource | None, *, method: str, tokens: int, ranks: int) -> Draft:
    kinds: Mapping[str, DraftKind] = {"eagle3": "eagle3", "dflash": "block", "dspark": "block"}
    kind = kinds.get(method, "eagle")
    draft = head_draft(dims, source, kind=kind, method=method, tokens=tokens, ranks=ranks)
    if source is not None and str(source.config.get("model_type", "")).startswith(_BORROWS_CACHE):
        return replace(draft, layers=())  # its layers attend to what the model's have cached
    return draft


def rank_draft(case: Case) -> Figure | None:
    """Bytes of the draft on a rank of the last stage, without modules of the model's own checkpoint."""
    version = case.version
    return draft_weights(
        case.draft, case.dims, case.kind, own_tables=case.request.layout.pp > 1,
        equal_heads_shared=version.at_least(0, 10) and not version.at_least(0, 13),
    )  # fmt: skip


def module_tables(case: Case) -> int:
    """Tables that modules keep for themselves: the embedding where stages divide the model, and the output table of
    some families until 0.16."""
    if case.draft.kind != "mtp":
        return 0
    own_output = case.dims.family.startswith(_OWN_OUTPUT) and not case.version.at_least(0, 17)
    return int(case.request.layout.pp > 1) + (case.draft.modules if own_output else 0)


def runs_newer_runner(draft: Draft, version: EngineVersion) -> bool:
    """Whether the newer runner can draft this way; else the older one runs."""
    if draft.method in _WITHOUT_CACHE:
        return draft.method == "extract_hidden_states" and version.at_least(0, 31)
    if draft.method == "draft_model":
        return version.at_least(0, 31)
    return draft.kind != "block" or version.at_least(0, 25)


_DRAFTED_LOGITS = 2 + 2
_BONUS_ROWS = 2 + 4
_TARGET_ROWS = 4 + 4
_SORTED = 12 + 20
_SAMPLED = 4 + 4


def verifying_bytes_per_logit(version: EngineVersion, *, newer_runner: bool, sorts: bool) -> int:
    """Bytes per request and vocabulary entry while the older runner profiles one drafted token per request; 0 where
    it does no more than sample.

    From 0.13 on it holds logits of both tokens in 16 bits, the bonus row and its copy in 32, the drafted row in 32 and,
    from 0.15 on, a copy of it to work on; then what sorting takes, or probabilities and noise.
    """
    if newer_runner or not version.at_least(0, 13):
        return 0
    target = _TARGET_ROWS if version.at_least(0, 15) else _TARGET_ROWS // 2
    return _DRAFTED_LOGITS + _BONUS_ROWS + target + (_SORTED if sorts else _SAMPLED)
