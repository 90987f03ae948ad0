"""What a step of a model reads and computes, and what a card can do, from the catalogue's facts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.policies.dims import Dims, LayerDims, dims_from_config
from onebudget.planner.policies.formats import FORMATS, weight_format
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank
from onebudget.planner.simulate.card import StepLoad

if TYPE_CHECKING:
    from onebudget.planner.source import ModelSource

KV_ELEMENT_BYTES = 2
WINDOWS_ARE_IGNORED = "Step times take every layer to attend to everything, although some look back over a window only."


def load_of_model(source: ModelSource) -> tuple[StepLoad, tuple[str, ...]]:
    """Weights, arithmetic and cache of one model on one card, and what was left out.

    A token meets all weights but the table of embeddings, and of experts those it is sent to. A query head and a
    dimension of its scores or sums take 2 operations per attended token; of a latent cache all heads read the whole
    latent. Raises ``ModelError`` for a config that does not say enough.
    """
    dims = dims_from_config(source.config, source.name)
    kind = weight_format(None, dims.quantization, source.name)
    load = StepLoad(
        weight_bytes=source.stored_bytes or weights_on_rank(dims, kind, Shard()).bytes,
        parameters=_met_parameters(dims),
        kv_bytes_per_token=sum(_cached_elements(layer) for layer in dims.layers) * KV_ELEMENT_BYTES or None,
        flops_per_attended_pair=sum(_pair_flops(dims, layer) for layer in dims.layers),
    )
    return load, (WINDOWS_ARE_IGNORED,) if dims.has_windows else ()


def _met_parameters(dims: Dims) -> int:
    met = replace(dims, experts=dims.experts_per_token, max_len=0, multimodal=False)
    return weights_on_rank(met, FORMATS["bf16"], Shard(has_embedding=False)).bytes // 2


def _cached_elements(layer: LayerDims) -> int:
    return layer.latent + layer.kv_heads * (layer.k_dim + layer.v_dim)


def _pair_flops(dims: Dims, layer: LayerDims) -> int:
    width = layer.latent + dims.kv_lora if layer.latent else layer.k_dim + layer.v_dim
    return 2 * dims.heads * width


def load_of_gpu(name: str, *, known: StepLoad) -> StepLoad:
    """Bandwidth and arithmetic of a card of the catalogue. An unknown card is one only where ``known`` has neither:
    ``ConfigError`` with near matches."""
    try:
        gpu = find_gpu(name)
    except ConfigError:
        if known.bandwidth_bytes_per_s is None or known.peak_flops is None:
            raise
        return StepLoad(gpu=name)
    return StepLoad(gpu=gpu.name, bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s, peak_flops=gpu.flops)
