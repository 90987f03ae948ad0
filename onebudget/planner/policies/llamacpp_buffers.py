"""llama.cpp's buffers: what a model with a context takes of the cards and of the host, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import HostLine
from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.formats import cache_bits, weight_format
from onebudget.planner.policies.settings import switch, whole
from onebudget.planner.policies.vllm.groups import CachedLayer, cached_layers
from onebudget.planner.policies.weight_headers import rank_weights
from onebudget.planner.policies.weight_rules import Shard
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.planner.policies.base import PlanRequest
    from onebudget.planner.policies.dims import Dims

_PAD = 256
_PIPELINE_COPIES = 4
_EXPERT_TENSOR = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\..*(?:_exps\.|\.experts\.)")


@dataclass(frozen=True, slots=True)
class Placement:
    """What goes where: cells of the cache, layers on the cards (the last ones), whether the output matrix is there
    too, and how many of the first layers leave their experts on the host."""

    n_ctx: int
    layers: int
    output: bool = True
    n_cpu_moe: int = 0


def kv_bytes(dims: Dims, settings: Mapping[str, Any], kv_dtype: str | None, length: int, first_layer: int = 0) -> int:
    """Cells times the widths of keys and values of the layers from ``first_layer`` on; windowed layers keep the window
    and one physical batch."""
    sequences = whole(settings, "n_seq_max", 1) or 1
    ubatch = whole(settings, "n_ubatch", 512) or 512
    whole_windows = switch(settings, "swa_full", default=True)
    total = 0
    for layer in _cached(dims, settings, kv_dtype, first_layer):
        if layer.kind == "state":
            total += sequences * layer.state_bytes
            continue
        cells = align_up(length, _PAD)
        if layer.window and not whole_windows:
            cells = min(cells, align_up(layer.window + ubatch, _PAD))
        total += cells * layer.token_bytes
    return total


def _cached(dims: Dims, settings: Mapping[str, Any], kv_dtype: str | None, first_layer: int) -> list[CachedLayer]:
    bits = cache_bits(str(settings.get("type_k") or kv_dtype or "f16"), 2, None)
    return cached_layers(replace(dims, layers=dims.layers[first_layer:]), bits, 1, (4, 4), 0)


def compute_bytes(dims: Dims, settings: Mapping[str, Any], length: int, copies: int) -> int:
    """A card's scratch: logits and embeddings of a physical batch, or, without flash attention, the scores."""
    ubatch = whole(settings, "n_ubatch", 512) or 512
    if switch(settings, "flash_attn", default=True):
        nbytes = ubatch * dims.vocab * 4 + ubatch * dims.hidden * 4
    else:
        nbytes = dims.heads * length * ubatch * 4 + 4 * length * ubatch + 16 * dims.hidden * ubatch
    return nbytes * 4 // 3 if copies > 1 else nbytes


def host_compute_bytes(dims: Dims, settings: Mapping[str, Any], length: int, copies: int) -> int:
    """The host's scratch: positions and masks of a physical batch over the context, and its embeddings."""
    ubatch = whole(settings, "n_ubatch", 512) or 512
    return length * ubatch * 4 * copies + dims.hidden * ubatch * 4


class Buffers:
    """Sizes of one model under one set of settings, all cards together."""

    def __init__(self, request: PlanRequest, settings: Mapping[str, Any], dims: Dims) -> None:
        self.request = request
        self.settings = settings
        self.dims = dims
        self.cards = request.n_gpus
        self._kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
        self._copies = _PIPELINE_COPIES if self.cards > 1 else 1

    def cache(self, place: Placement) -> int:
        return kv_bytes(self.dims, self.settings, self.request.kv_dtype, place.n_ctx, self._first(place))

    def compute(self, place: Placement) -> int:
        return compute_bytes(self.dims, self.settings, place.n_ctx, self._copies) * self.cards

    def weights(self, place: Placement) -> Figure:
        """On the cards. The embedding stays on the host."""
        shard = Shard(first_layer=self._first(place), end_layer=len(self.dims.layers), has_embedding=False,
                      has_head=place.output)  # fmt: skip
        found = rank_weights(self.request, self._plain, self._kind, shard)
        kept = sum(self.experts[self._first(place) : place.n_cpu_moe])
        low, high = found.low_bytes - kept, found.high_bytes - kept
        return replace(found, bytes=found.bytes - kept, low_bytes=max(low, 0), high_bytes=high)

    def on_cards(self, place: Placement) -> int:
        return self.weights(place).bytes + self.cache(place) + self.compute(place)

    def on_host(self, place: Placement) -> tuple[HostLine, ...]:
        """What stays on the host: the embedding and whatever is not on the cards, scratch, and logits."""
        everything = rank_weights(self.request, self._plain, self._kind, Shard(end_layer=len(self.dims.layers)))
        all_cells = kv_bytes(self.dims, self.settings, self.request.kv_dtype, place.n_ctx)
        logits = (whole(self.settings, "n_seq_max", 1) or 1) * self.dims.vocab * 4
        sizes = {
            "cpu_weights": everything.bytes - self.weights(place).bytes,
            "cpu_kv_cache": all_cells - self.cache(place),
            "cpu_buffers": host_compute_bytes(self.dims, self.settings, place.n_ctx, self._copies) + logits,
        }
        return tuple(HostLine(name, max(nbytes, 0), "host") for name, nbytes in sizes.items() if nbytes > 0)

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Bytes of the experts of each layer, as far as they can be left on the host."""
        dims = self.dims
        if not dims.experts:
            return (0,) * len(dims.layers)
        if self.request.model.tensors and self.request.weights_dtype is None:
            stored = [0] * len(dims.layers)
            for tensor in self.request.model.tensors:
                found = _EXPERT_TENSOR.search(tensor.name)
                if found is not None and int(found[1]) < len(stored):
                    stored[int(found[1])] += tensor.nbytes
            return tuple(stored)
        matrices = 3 if dims.gated else 2
        each = int(Fraction(self._kind.bits) * dims.experts * matrices * dims.hidden * dims.expert_intermediate / 8)
        return tuple(each if index >= dims.dense_layers else 0 for index in range(len(dims.layers)))

    @property
    def _plain(self) -> Dims:
        return replace(self.dims, max_len=0)  # no rotary table is kept

    def _first(self, place: Placement) -> int:
        return len(self.dims.layers) - place.layers
