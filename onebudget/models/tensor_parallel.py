"""One model over several ranks: each holds a part of every large weight and of the attention heads.

transformers supplies the plan, the hooks that exchange activations, and, as DTensors, how each weight is cut. The
model is loaded in host memory as for one rank; this rank's parts are cut on their way into the device buffer, so a
device never holds more than its share.

Under attention data parallelism only what stands behind attention is cut (MLPs, experts). Attention, embedding and
head are whole on every rank, and so are the keys and values of its own requests.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from onebudget.errors import ConfigError, ModelError
from onebudget.models.experts import ROW_ALIGNMENT_BYTES
from onebudget.models.rank_rows import share_rows

if TYPE_CHECKING:
    from onebudget.models.facts import ModelFacts

_KEY_PROJECTIONS = {"k_proj", "qkv_proj", "query_key_value"}
"""Modules whose output holds the keys; where a plan cuts them by columns, each rank has its own heads."""

_WHOLE_UNDER_DATA_PARALLELISM = ("attn", "attention", "norm")
"""Parts of the names of a layer's children that every rank keeps whole under attention data parallelism."""

_meshes: dict[int, tuple[DistributedConfig, Any, DeviceMesh]] = {}


def facts_of_rank(folder: Path, facts: ModelFacts, ranks: int, *, attention_dp: bool = False) -> ModelFacts:
    """Facts of one rank's part of the model in ``folder``. ``ModelError`` with the numbers where it can't be divided.

    Only attention is divided in them: sizes of hidden states and vocabulary stay whole, and ``head_dim`` is a head's.
    With ``attention_dp`` attention stays whole too. ``ConfigError`` where one rank alone asks for that.
    """
    if ranks == 1:
        if attention_dp:
            raise ConfigError(
                "attention_dp deals requests to several ranks, and this process is alone: start it under torchrun, or "
                "leave it out.",
                field="attention_dp",
                value=True,
            )
        return facts
    plan = _plan_of(folder)
    if not plan:
        raise ModelError(f"{facts.name} can't be divided over {ranks} ranks: {facts.architecture} has no plan for it.")
    if attention_dp:
        if not _behind_attention(plan):
            raise ModelError(
                f"{facts.name} has nothing to divide over {ranks} ranks but attention, which attention_dp keeps whole: "
                "leave attention_dp out."
            )
        return replace(facts, ranks=ranks, attention_dp=True)
    if not _divides_heads(plan):
        return replace(facts, ranks=ranks)
    for count, what in ((facts.num_heads, "attention heads"), (facts.num_kv_heads, "KV heads")):
        if count % ranks:
            usable = [size for size in range(2, count + 1) if not facts.num_heads % size + facts.num_kv_heads % size]
            way_out = f"{', '.join(map(str, usable))} ranks would do" if usable else "it runs on one rank only"
            raise ModelError(
                f"{facts.name} has {count} {what}, which {ranks} ranks can't share evenly ({facts.num_heads} attention "
                f"and {facts.num_kv_heads} KV heads): {way_out}."
            )
    if "latent" in facts.layers:
        raise ModelError(
            f"{facts.name} can't be divided over ranks: cutting the heads of latent attention isn't built."
        )
    return replace(facts, num_heads=facts.num_heads // ranks, num_kv_heads=facts.num_kv_heads // ranks, ranks=ranks)


def _plan_of(folder: Path) -> Mapping[str, str]:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config.get_text_config().base_model_tp_plan or {}


def _divides_heads(plan: Mapping[str, str]) -> bool:
    return any(key.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and style == "colwise" for key, style in plan.items())


def _behind_attention(plan: Mapping[str, str]) -> dict[str, str]:
    """The rules of ``plan`` for what a layer computes on each token by itself."""
    return {
        name: style
        for name, style in plan.items()
        if "*" in name and not any(word in _layer_child(name) for word in _WHOLE_UNDER_DATA_PARALLELISM)
    }


def _layer_child(name: str) -> str:
    """``mlp`` of ``model.layers.*.mlp.gate_proj``."""
    return name.split("*", 1)[1].lstrip(".").split(".", 1)[0]


def split(module: Any, ranks: int, *, attention_dp: bool = False) -> dict[int, torch.Tensor]:
    """Make ``module`` this rank's part: hooks that exchange activations, and DTensors without data for what is cut.

    Returns the whole tensor behind each of those, by ``id``. Tied weights that are cut alike stay tied. All ranks call
    this the first time; dry runs may repeat it alone.
    """
    if ranks == 1:
        return {}
    import torch.distributed._tools.fake_collectives  # dry runs: gives exchanges a result on meta tensors

    whole = {}
    for child in module.modules():
        for name, tensor in list(child._parameters.items()):
            if tensor is not None:
                whole[child, name] = tensor
                child._parameters[name] = torch.nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
    config, meshes, _ = _mesh(module, ranks)
    if attention_dp:
        module.tp_plan = _behind_attention(module.tp_plan)
        share_rows(_children_in(module, module.tp_plan))
    type(module).maybe_distribute_model(module, config, meshes)
    behind: dict[int, torch.Tensor] = {}
    cut: dict[object, DTensor] = {}
    for (child, name), tensor in whole.items():
        empty = child._parameters[name]
        if isinstance(empty, DTensor):
            if tensor.ndim == 3 and empty.to_local().shape[-1] < tensor.shape[-1]:
                refuse_ragged_experts(tensor.shape[-1], ranks, tensor.element_size())
            child._parameters[name] = cut.setdefault((id(tensor), empty.placements), empty)
            behind[id(child._parameters[name])] = tensor
        else:
            child._parameters[name] = tensor
    return behind


def refuse_ragged_experts(width: int, ranks: int, element_bytes: int) -> None:
    """``ModelError`` where experts of ``width`` inner elements can't be cut into rows for grouped products."""

    def even(size: int) -> bool:
        return width % size == 0 and width // size * element_bytes % ROW_ALIGNMENT_BYTES == 0

    if not even(ranks):
        usable = ", ".join(str(size) for size in range(2, width + 1) if even(size))
        way_out = f"{usable} ranks would do" if usable else "they run on one rank only"
        raise ModelError(
            f"Experts of width {width} can't be divided over {ranks} ranks: each rank needs the same part of it, in "
            f"multiples of {ROW_ALIGNMENT_BYTES} B ({element_bytes} B an element): {way_out}."
        )


def _children_in(module: Any, plan: Collection[str]) -> list[torch.nn.Module]:
    """Those children of the layers that have a rule in ``plan``."""
    wanted = {f"{name.split('*', 1)[0]}*.{_layer_child(name)}" for name in plan}
    return [child for name, child in module.named_modules() if replace_layer_number_by_wildcard(name) in wanted]


def part(tensor: torch.Tensor, behind: Mapping[int, torch.Tensor] = MappingProxyType({})) -> torch.Tensor:
    """What this rank holds of ``tensor``: a plain tensor, cut from the whole one where there is one ``behind`` it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        whole = behind.get(id(tensor))
        if whole is None:
            return tensor.to_local()
        _, _, host_mesh = _meshes[tensor.device_mesh.size()]
        return distribute_tensor(whole.detach(), host_mesh, tensor.placements, src_data_rank=None).to_local()


def part_bytes(tensor: torch.Tensor) -> int:
    """Bytes of ``part(tensor)``."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def placed(view: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``view``, memory that holds the part, in the form that ``tensor`` has in its module."""
    if isinstance(tensor, DTensor):
        view = DTensor.from_local(
            view, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return torch.nn.Parameter(view, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else view


def forget_meshes() -> None:
    """The process group ends, and with it what was made of it.

    Models live on for a while and refer to their mesh, whose own references to groups would keep connections open.
    """
    _meshes.clear()
    for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()


def _mesh(module: Any, ranks: int) -> tuple[DistributedConfig, Any, DeviceMesh]:
    """transformers' settings and mesh, and a mesh of host memory to cut weights on. Made once, by all ranks."""
    if ranks not in _meshes:
        wanted = DistributedConfig(tp_size=ranks, tp_plan="auto")
        config, _, meshes = type(module).prepare_distribute_model(wanted)
        _meshes[ranks] = config, meshes, init_device_mesh("cpu", (ranks,))
    return _meshes[ranks]
