"""Load a causal language model through transformers and put its weights into one buffer of the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from onebudget.errors import ModelError
from onebudget.models import hooks, tensor_parallel
from onebudget.models.facts import DTYPE_BYTES, ModelFacts, facts_from_config, read_config
from onebudget.models.files import check_weight_files
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager

OWNER = "weights"
_TENSOR_ALIGNMENT_BYTES = 64  # a cache line, and wide enough for any vector load
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_RUNNABLE_LAYERS = {"full", "sliding", "latent"}


@dataclass(slots=True)
class LoadedModel:
    """A model whose parameters and buffers are views of ``weights``. ``release()`` drops both."""

    facts: ModelFacts
    module: Any
    weights: Buffer
    dtype: str

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def refill(self, module: Any) -> None:
        """Write the values of a freshly loaded ``module`` of the same model into the tensors placed already."""
        whole = tensor_parallel.split(module, self.facts.ranks, attention_dp=self.facts.attention_dp)
        for (_, name, placed), (_, other, fresh) in zip(_tensors(self.module), _tensors(module), strict=True):
            assert name == other and placed.shape == fresh.shape, (name, other)
            tensor_parallel.part(placed).copy_(tensor_parallel.part(fresh, whole))

    def place_anew(self, module: Any, manager: BufferManager) -> None:
        """Take ``module`` and new memory for it; what was lost is forgotten."""
        self.weights.release()
        placed = place_weights(module, self.facts, self.dtype, manager)
        self.module, self.weights = placed.module, placed.weights

    def release(self) -> None:
        """Drop the module, then its memory. Safe to call again."""
        self.module = None
        if not self.weights.released:
            self.weights.release()


def read_facts(folder: Path) -> ModelFacts:
    """Facts of a model folder that this engine can run. ``ModelError`` says why it can't."""
    config = read_config(folder)
    facts = facts_from_config(config, name=folder.name)
    _refuse_position_rules(folder, config)
    if facts.quantization:
        raise ModelError(
            f"{folder} is quantised ({facts.quantization}); this engine runs float32, float16 and bfloat16 only."
        )
    foreign = sorted(set(facts.layers) - _RUNNABLE_LAYERS)
    if foreign:
        raise ModelError(
            f"{folder} has {' and '.join(foreign)} layers; this engine runs full, sliding and latent attention only."
        )
    return facts


def _refuse_position_rules(folder: Path, config: dict[str, Any]) -> None:
    """Rules that look at the whole sequence: a packed step holds several, so transformers would apply the wrong one."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind in {"dynamic", "longrope"}:
        raise ModelError(f"{folder} scales its positions by {kind}, which depends on the length of one whole sequence.")
    if "chunked_attention" in (text.get("layer_types") or ()):
        raise ModelError(f"{folder} has chunked attention layers; this engine runs full, sliding and latent ones only.")


def host_model(folder: Path, dtype: str) -> Any:
    """The module with its weights in ordinary host memory, not on any card yet."""
    check_weight_files(folder)
    hooks.register()
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            **hooks.implementations(),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"{folder} can't be loaded: {str(error).splitlines()[0]}") from error
    module, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the model's tensors, the first is {missing[0]}: the loader would make "
            "them up at random. Fetch the weight files again, or check that config.json belongs to them."
        )
    return module.eval()


def meta_model(folder: Path, dtype: str) -> Any:
    """The same module with shapes only, for dry runs: no weights are read."""
    hooks.register()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=getattr(torch, dtype), **hooks.implementations()
        )
    return module.eval()


def place_weights(module: Any, facts: ModelFacts, dtype: str, manager: BufferManager) -> LoadedModel:
    """Move every parameter and buffer, or this rank's part of it, into one device buffer, tensor by tensor.

    Tied tensors stay tied. ``AllocationError`` when the device has no room; no tensor was moved then. ``ModelError``
    when the module's attention is of a form we can't take over.
    """
    hooks.keep_latent(module, facts)
    whole = tensor_parallel.split(module, facts.ranks, attention_dp=facts.attention_dp)
    weights = manager.gpu(weight_bytes(module), owner=OWNER)
    storage, offset = weights.as_tensor(), 0
    placed: dict[int, torch.Tensor] = {}
    for table, name, tensor in _tensors(module):
        if id(tensor) not in placed:
            part = tensor_parallel.part(tensor, whole)
            nbytes = part.numel() * part.element_size()
            view = storage[offset : offset + nbytes].view(part.dtype).view(part.shape)
            if not view.is_meta:
                view.copy_(part)
            offset += align_up(nbytes, _TENSOR_ALIGNMENT_BYTES)
            placed[id(tensor)] = tensor_parallel.placed(view, tensor)
        table[name] = placed[id(tensor)]
    return LoadedModel(facts, module, weights, dtype)


def weight_bytes(module: Any) -> int:
    """Bytes this rank holds of all distinct parameters and buffers, aligned as ``place_weights`` lays them out."""
    distinct = {id(tensor): tensor for _, _, tensor in _tensors(module)}
    return sum(align_up(tensor_parallel.part_bytes(tensor), _TENSOR_ALIGNMENT_BYTES) for tensor in distinct.values())


def _tensors(module: Any) -> Iterator[tuple[dict[str, torch.Tensor], str, torch.Tensor]]:
    """Every (table, name, tensor) of the module tree. A tied tensor appears once per place it stands in."""
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor


def choose_dtype(requested: str, facts: ModelFacts, torch_device: str) -> str:
    """torch's name of the computing dtype for the ``dtype`` knob.

    ``auto`` on a CPU is bfloat16 where the processor multiplies it natively, else float32: emulated bfloat16 is far
    slower from a few rows on. Other devices take the model's own dtype.
    """
    if requested != "auto":
        return _TORCH_NAMES[requested]
    if torch_device.startswith("cuda"):
        return facts.dtype if facts.dtype in DTYPE_BYTES else "bfloat16"
    return "bfloat16" if native_bfloat16() else "float32"


def native_bfloat16() -> bool:
    """Whether this processor has bfloat16 dot products (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def end_token_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end a sequence: the generation config may list several."""
    listed = getattr(module.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    return frozenset([listed] if isinstance(listed, int) else listed or ())


def load_tokenizer(folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{folder} has no usable tokenizer: {str(error).splitlines()[0]}") from error
