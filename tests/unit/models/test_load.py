from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from onebudget import LLM
from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind, tiny_model
from onebudget.errors import AllocationError, ModelError
from onebudget.models import load
from onebudget.models.files import check_weight_files

Edit = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("gqa", tmp_path_factory.mktemp("gqa"))


@pytest.fixture
def edited(folder: Path, tmp_path: Path) -> Edit:
    """A copy of the folder with other values in its config."""

    def edit(**keys: Any) -> Path:
        copy = tmp_path / "model"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **keys}))
        return copy

    return edit


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=8 * 2**20) as device:
        yield device


def place(folder: Path, device: Device, dtype: str = "float32") -> load.LoadedModel:
    module = load.host_model(folder, dtype)
    return load.place_weights(module, load.read_facts(folder), dtype, BufferManager(device.create_stream()))


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    """The whole way in: an LLM of this folder is refused, and nothing stays on any card."""
    with pytest.raises(ModelError) as error:
        LLM(folder, dtype="fp32", device_memory="8MiB", max_seq_len=64, max_num_tokens=64)
    return str(error.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "gone")


def test_quantised_weights(edited: Edit) -> None:
    assert "quantised (awq)" in refused(edited(quantization_config={"quant_method": "awq", "bits": 4}))


def test_linear_layers(edited: Edit) -> None:
    assert "linear" in refused(edited(layer_types=["linear_attention", "full_attention"]))


def test_truncated_weights(edited: Edit) -> None:
    weights = edited() / "model.safetensors"
    weights.chmod(0o644)
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert f"{len(content):,} bytes and the file has {len(content) - 100:,} (100 missing)" in refused(weights.parent)


def test_no_tokenizer(edited: Edit) -> None:
    folder = edited()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no usable tokenizer" in refused(folder)


def test_positions_that_depend_on_a_whole_sequence(edited: Edit) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "positions by dynamic" in refused(edited(rope_parameters=rope))


def test_attention_in_chunks(edited: Edit) -> None:
    assert "chunked attention" in refused(edited(layer_types=["chunked_attention", "full_attention"]))


def test_an_architecture_nobody_knows(edited: Edit) -> None:
    assert "can't be loaded" in refused(edited(model_type="sequence-oracle", architectures=["Oracle"]))


def test_weights_of_another_shape(edited: Edit) -> None:
    assert "can't be loaded" in refused(edited(vocab_size=400))


def test_weights_that_the_files_lack_are_not_made_up(edited: Edit) -> None:
    assert "model.layers.2" in refused(edited(num_hidden_layers=3))


def test_code_of_a_model_folder_is_never_offered_to_run(edited: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    folder = edited(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (folder / "own.py").write_text("raise SystemExit('executed')")
    refused(folder)
    assert not asked


def test_attention_that_takes_more_than_ours_gives(tmp_path: Path) -> None:
    """Attention sinks reach the attention function as an argument of their own; dropping it would be wrong answers."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    from onebudget.devtools.tiny_models import tiny_tokenizer

    folder = tmp_path / "sinks"
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer(folder)
    refused(folder)


# -- placing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_alone_tell_the_weight_bytes(kind: TinyKind, dtype: str, tmp_path: Path) -> None:
    """What a dry run charges is what loading takes, to the byte, and no less than what lies in the files."""
    folder = tiny_model(kind, tmp_path)
    real, shapes = load.host_model(folder, dtype), load.meta_model(folder, dtype)
    nbytes = load.weight_bytes(real)
    assert load.weight_bytes(shapes) == nbytes
    stored = sum(entry.nbytes for entry in check_weight_files(folder)) * {"float32": 4, "bfloat16": 2}[dtype] // 4
    assert stored <= nbytes < stored + 64 * (len(check_weight_files(folder)) + 20)


def test_every_tensor_is_a_view_of_one_buffer_and_has_its_values(folder: Path, device: Device) -> None:
    original = load.host_model(folder, "float32").state_dict()
    model = place(folder, device)
    start, end = model.weights.data_ptr, model.weights.data_ptr + model.weight_bytes
    for name, tensor in model.module.state_dict().items():
        assert start <= tensor.data_ptr() < end
        assert torch.equal(tensor, original[name])
    assert device.used_by_owner() == {"weights": -(-model.weight_bytes // 512) * 512}
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    model.release()


def test_tied_tensors_are_placed_once(tmp_path: Path, device: Device) -> None:
    untied = load.weight_bytes(load.host_model(tiny_model("gqa", tmp_path / "untied"), "float32"))
    model = place(tiny_model("gqa", tmp_path / "tied", tie_word_embeddings=True), device)
    assert model.facts.tie_word_embeddings
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert untied - model.weight_bytes == 320 * 64 * 4
    model.release()


def test_a_card_one_byte_too_small_leaves_the_module_alone(folder: Path) -> None:
    module = load.host_model(folder, "float32")
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    pages = -(-load.weight_bytes(module) // 4096)
    facts = load.read_facts(folder)
    with open_device("host", capacity_bytes=pages * 4096, granularity_bytes=4096) as device:
        load.place_weights(module, facts, "float32", BufferManager(device.create_stream())).release()
    module = load.host_model(folder, "float32")
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    with open_device("host", capacity_bytes=(pages - 1) * 4096, granularity_bytes=4096) as device:
        with pytest.raises(AllocationError) as full:
            load.place_weights(module, facts, "float32", BufferManager(device.create_stream()))
        assert full.value.owner == "weights"
        assert device.sample().alloc_live == 0
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before


def test_release_gives_everything_back(folder: Path, device: Device) -> None:
    place(folder, device).release()
    device.empty_cache()
    assert device.used_bytes() == 0


# -- small decisions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "torch_device", "dtype"),
    [("fp32", "cpu", "float32"), ("bf16", "cpu", "bfloat16"), ("fp16", "cuda", "float16"), ("auto", "cuda", "float32")],
)
def test_computing_dtype(folder: Path, requested: str, torch_device: str, dtype: str) -> None:
    assert load.choose_dtype(requested, load.read_facts(folder), torch_device) == dtype


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_computes_in_bfloat16_where_it_can(folder: Path, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "native_bfloat16", lambda: native)
    assert load.choose_dtype("auto", load.read_facts(folder), "cpu") == ("bfloat16" if native else "float32")


@pytest.mark.parametrize(("listed", "ends"), [(2, {2}), ([2, 3], {2, 3})])
def test_end_tokens_come_from_the_generation_config(edited: Edit, listed: object, ends: set[int]) -> None:
    folder = edited()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    module, tokenizer = load.host_model(folder, "float32"), load.load_tokenizer(folder)
    assert load.end_token_ids(module, tokenizer) == ends


def test_without_a_generation_config_the_config_counts(edited: Edit) -> None:
    folder = edited(eos_token_id=3)
    (folder / "generation_config.json").unlink()
    assert load.end_token_ids(load.host_model(folder, "float32"), load.load_tokenizer(folder)) == {3}
