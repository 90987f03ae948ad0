"""Our paged attention inside transformers' models, through its attention interface.

No mask function is registered with it: transformers then builds no mask at all, which is its documented way for
engines that handle masking themselves. Step data travels in a context variable, because not every architecture
hands extra keyword arguments down to its attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from onebudget.attention.base import current_backend
from onebudget.errors import ModelError
from onebudget.models import experts

if TYPE_CHECKING:
    from onebudget.models.facts import ModelFacts

ATTENTION_NAME = "onebudget"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: q ``[1, heads, tokens, dim]`` in, ``[1, tokens, heads, dim]`` out.

    From a latent attention that ``keep_latent`` prepared, key and value are the two latents.
    """
    _refuse_unknown(module, extras)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    latent = hasattr(module, "expand_kv")
    backend = current_backend.get()
    backend.kv_written = True
    output = backend.forward(
        layer,
        query,
        key,
        value,
        scale=scale,
        sliding_window=sliding_window,
        up_projection=module.kv_b_proj.weight if latent else None,  # type: ignore[union-attr, arg-type]
    )
    return output, None


# What transformers hands to every attention function beside the tensors, and an engine of its own need not heed.
_HARMLESS = frozenset(
    {
        "cache",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)


def _refuse_unknown(module: torch.nn.Module, extras: dict[str, Any]) -> None:
    """Attention sinks, soft caps and the like reach us as arguments: leaving one out would be wrong answers."""
    unknown = sorted(name for name, value in extras.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which this engine does not compute."
        )


def register() -> None:
    """Make our attention and experts known to transformers. Safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    experts.register()


def implementations() -> dict[str, str]:
    """What to pass when a model is made."""
    return {"attn_implementation": ATTENTION_NAME, "experts_implementation": experts.EXPERTS_NAME}


def keep_latent(model: torch.nn.Module, facts: ModelFacts) -> None:
    """Let every latent attention of ``model`` hand over its latents instead of the keys and values they expand to.

    Does nothing for other models. Raises ``ModelError`` for latent attention of a form that our backend can't compute.
    """
    if "latent" not in facts.layers:
        return
    found = [module for module in model.modules() if hasattr(module, "expand_kv")]
    reason = _why_unusable(found, facts)
    if reason is not None:
        raise ModelError(f"{facts.name} can't run: {reason}.")
    for module in found:
        module.expand_kv = _as_given  # type: ignore[assignment]


def _as_given(compressed: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return compressed, rotary


def _why_unusable(found: list[torch.nn.Module], facts: ModelFacts) -> str | None:
    if facts.latent is None:
        return "its config names no head sizes for the latent attention (qk_nope_head_dim, v_head_dim)"
    if facts.latent.value_dim > facts.latent.key_dim:
        return f"values of {facts.latent.value_dim} elements are wider than keys of {facts.latent.key_dim}"
    if facts.sliding_window is not None:
        return "latent attention with a sliding window is not built yet"
    if sorted(module.layer_idx for module in found) != list(range(len(facts.layers))):  # type: ignore[type-var]
        return f"{len(found)} latent attentions in {len(facts.layers)} layers, and one each is expected"
    if any(getattr(module, "indexer", None) is not None for module in found):
        return "sparse latent attention (an indexer chooses what is attended) is not built yet"
    return None
