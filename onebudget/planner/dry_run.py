"""The engine's own steps on a model's shapes: a few layers are run, and the rest is added by arithmetic.

Layers of one kind take the same memory one after the other, so a peak shows with the first few of each. What grows
with their number, weights and cached tokens, is counted exactly. The result is that of a run of all layers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebudget.device.meter import ALLOCATOR_ROUNDING_BYTES
from onebudget.engine.dry_runs import dry_profile
from onebudget.engine.graph_budget import declare_graphs
from onebudget.engine.kv_cache import layer_groups
from onebudget.errors import ModelError, OneBudgetError
from onebudget.models.facts import ModelFacts, facts_from_config
from onebudget.models.load import meta_model, weight_bytes
from onebudget.planner.rank_config import first_layers, text_part
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.budget.profile import ProfileResult
    from onebudget.config import BudgetConfig
    from onebudget.engine.graph_budget import GraphDeclaration

_DENSE_FIRST = "first_k_dense_replace"
_TELLING_DENSE = 2


@contextmanager
def few_layers(config: Mapping[str, Any], name: str, dtype: str, granule_bytes: int) -> Iterator[FewLayers]:
    """Dry runs of the model that ``config`` describes. ``ModelError`` when transformers can't build it.

    ``granule_bytes`` is the unit of physical memory on the device that is planned for.
    """
    with tempfile.TemporaryDirectory(prefix="onebudget-plan-") as folder, _quiet_transformers():
        yield FewLayers(config, name, dtype, granule_bytes, Path(folder))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """What it has to say about configs that were cut short is of no use to anybody."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class FewLayers:
    """Dry runs of one model; ``folder`` holds its config and nothing else. Made by ``few_layers``."""

    def __init__(self, config: Mapping[str, Any], name: str, dtype: str, granule_bytes: int, folder: Path) -> None:
        self._granule_bytes = granule_bytes
        self._name = name
        self.folder = _write(folder / "whole", config)
        self.facts = facts_from_config(config, name=name)
        if "linear" in self.facts.layers:
            raise ModelError(f"{name} has recurrent layers, and our engine runs attention only.")
        module = _meta(self.folder, dtype)
        self._weights = {dtype: _held_bytes(module)}
        few = _shortened(config, _kinds(module, len(self.facts.layers)))
        self._few_folder = _write(folder / "few", few)
        self._few_facts = facts_from_config(few, name=name)
        self._all_run = few == config

    @property
    def layers_run(self) -> int:
        return len(self._few_facts.layers)

    def weights_bytes(self, dtype: str) -> int:
        if dtype not in self._weights:
            self._weights[dtype] = _held_bytes(_meta(self.folder, dtype))
        return self._weights[dtype]

    def profile(self, dtype: str, config: BudgetConfig) -> ProfileResult:
        with self._told_apart():
            few = dry_profile(self._few_folder, dtype, config, granularity_bytes=self._granule_bytes)
        if self._all_run:
            return few
        weights = self.weights_bytes(dtype) - few.model_bytes
        before, after = (self._pools(few, facts, dtype, config) for facts in (self._few_facts, self.facts))
        more = weights + _rounded(after) - _rounded(before)
        used = few.torch_used_bytes + more
        return replace(
            few,
            model_bytes=few.model_bytes + weights,
            torch_peak_bytes=few.torch_peak_bytes + more,
            torch_used_bytes=used,
            device_used_bytes=self._physical_bytes(few, used),
            allocated_bytes=sum(after),
        )

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """What the engine can't compute of a model is the model's affair: ``ModelError``, and in the model's name."""
        try:
            yield
        except ModelError as error:
            raise ModelError(str(error).replace(str(self._few_folder), self._name)) from error
        except OneBudgetError:
            raise
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelError(f"the steps of {self._name} can't be run here: {reason}") from error

    def _pools(self, few: ProfileResult, facts: ModelFacts, dtype: str, config: BudgetConfig) -> list[int]:
        """Bytes of the temporary pool of each group: all have as many tokens, and as many as with few layers."""
        tokens = few.allocated_bytes // max(1, _token_bytes(self._few_facts, dtype, config))
        return [tokens * group.bytes_per_token for group in layer_groups(facts, dtype, config)]

    def _physical_bytes(self, few: ProfileResult, used_bytes: int) -> int:
        """``used_bytes`` in whole pages; tensors outside the pool and pages with holes are as many as with few
        layers."""
        outside = few.device_used_bytes % self._granule_bytes
        holes = few.device_used_bytes - outside - align_up(few.torch_used_bytes - outside, self._granule_bytes)
        return align_up(used_bytes - outside, self._granule_bytes) + holes + outside

    def graphs(self, dtype: str, config: BudgetConfig) -> GraphDeclaration | None:
        with self._told_apart():
            declared = declare_graphs(self._few_folder, self._few_facts, dtype, config)
        if declared is None or self._all_run:
            return declared
        few, whole = (_token_bytes(facts, dtype, config) for facts in (self._few_facts, self.facts))
        return replace(declared, padding_bytes=declared.padding_bytes * whole // few if few else 0)


def _token_bytes(facts: ModelFacts, dtype: str, config: BudgetConfig) -> int:
    return sum(group.bytes_per_token for group in layer_groups(facts, dtype, config))


def _rounded(buffers: Sequence[int]) -> int:
    return sum(align_up(size, ALLOCATOR_ROUNDING_BYTES) for size in buffers)


def _write(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _meta(folder: Path, dtype: str) -> Any:
    """The model's modules without memory. Whatever a library raises about a config is that config's problem."""
    try:
        return meta_model(folder, dtype)
    except OneBudgetError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"transformers can't build a model from this config: {reason}") from error


def _shortened(config: Mapping[str, Any], kinds: Sequence[object]) -> dict[str, Any]:
    """The config with as many layers as tell everything; the same where that is all of them."""
    few: dict[str, Any] = json.loads(json.dumps(config))
    text = text_part(few)
    dense = int(text.get(_DENSE_FIRST) or 0)
    if dense > _TELLING_DENSE:
        kinds = kinds[dense - _TELLING_DENSE :]
        text[_DENSE_FIRST] = _TELLING_DENSE
    if telling_layers(kinds) < int(text["num_hidden_layers"]):
        first_layers(text, telling_layers(kinds))
    return few


def _held_bytes(module: Any) -> int:
    return align_up(weight_bytes(module), ALLOCATOR_ROUNDING_BYTES)


def telling_layers(kinds: Sequence[object]) -> int:
    """Layers from the first on that show every kind of layer, and one more.

    The first layer's input is the embedding itself, which later ones keep beside their own, so its kind must be seen
    again where there is more of it; and what the last layer leaves must be seen by another.
    """
    later = {kind: at for at, kind in reversed(list(enumerate(kinds))) if at}
    return min(len(kinds), 2 + max(later.values(), default=0))


def _kinds(module: Any, count: int) -> list[tuple[object, ...]]:
    return [_kind(layer) for layer in _layers(module, count)] or [(at,) for at in range(count)]


def _layers(module: Any, count: int) -> list[Any]:
    from torch.nn import ModuleList

    found = [child for child in module.modules() if isinstance(child, ModuleList) and len(child) == count]
    return list(found[0]) if found else []


def _kind(layer: Any) -> tuple[object, ...]:
    """Layers are alike when their parameters are, and they look back equally far."""
    windows = tuple(str(getattr(child, "sliding_window", None)) for child in layer.modules())
    return (*((name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()), windows)
