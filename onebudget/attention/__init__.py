"""Attention backends: each computes over the paged cache and declares the memory it needs for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.attention.base import AttentionBackend
    from onebudget.models.facts import ModelFacts

__all__ = ["backend_class", "backend_for"]


def backend_for(model: ModelFacts) -> type[AttentionBackend]:
    """The backend that runs this model's layers."""
    return backend_class("mla" if "latent" in model.layers else "gather")


def backend_class(name: str) -> type[AttentionBackend]:
    """The backend registered under ``name``; imported on first use."""
    if name == "gather":
        from onebudget.attention.gather import GatherBackend

        return GatherBackend
    if name == "mla":
        from onebudget.attention.mla import LatentBackend

        return LatentBackend
    raise ConfigError.for_field("attention_backend", name, "'gather' or 'mla'")
