"""Attention backends: each computes over the paged cache and declares the memory it needs for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.attention.base import AttentionBackend
    from onebudget.models.facts import ModelFacts

__all__ = ["backend_class", "backend_for", "check_kv_dtype"]


def backend_for(model: ModelFacts) -> type[AttentionBackend]:
    """The backend that runs this model's layers."""
    return backend_class("mla" if "latent" in model.layers else "gather")


def check_kv_dtype(model: ModelFacts, kv_cache_dtype: str) -> None:
    """Refuse a ``kv_cache_dtype`` that this model's backend can't store."""
    backend = backend_for(model)
    if kv_cache_dtype not in backend.kv_dtypes:
        allowed = (
            f"{' or '.join(repr(name) for name in sorted(backend.kv_dtypes))} for {model.name}: its {backend.name} "
            "backend keeps K and V in the model's own dtype, and only latent attention can store FP8 yet"
        )
        raise ConfigError.for_field("kv_cache_dtype", kv_cache_dtype, allowed)


def backend_class(name: str) -> type[AttentionBackend]:
    """The backend registered under ``name``; imported on first use."""
    if name == "gather":
        from onebudget.attention.gather import GatherBackend

        return GatherBackend
    if name == "mla":
        from onebudget.attention.mla import LatentBackend

        return LatentBackend
    raise ConfigError.for_field("attention_backend", name, "'gather' or 'mla'")
