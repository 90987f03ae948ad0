"""Facts of a model from folders, files and the catalogue; what is damaged is refused with a sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from onebudget.errors import ModelError
from onebudget.planner.source import resolve_model

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_folder_without_weights_has_a_config(folder: Path) -> None:
    source = resolve_model(str(folder))
    assert (source.name, source.config["hidden_size"], source.tensors) == ("tiny", 64, None)


def test_headers_tell_the_stored_bytes(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {"a.weight": [3, 5], "b.weight": [7]})
    assert resolve_model(str(folder)).stored_bytes == 2 * (15 + 7)
    assert resolve_model(str(folder / "model.safetensors")).stored_bytes == 2 * (15 + 7)


def test_several_files_are_one_model(folder: Path) -> None:
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a.weight": [3]})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b.weight": [4]})
    assert resolve_model(str(folder)).stored_bytes == 2 * 7


def test_one_file_of_several_stands_for_all_of_them(folder: Path) -> None:
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a.weight": [3]})
    with pytest.raises(ModelError, match=r"one of 2 files, and model-00002-of-00002\.safetensors is not there"):
        resolve_model(str(folder / "model-00001-of-00002.safetensors"))
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b.weight": [4]})
    assert resolve_model(str(folder / "model-00002-of-00002.safetensors")).stored_bytes == 2 * 7


def test_absurd_part_numbers(folder: Path) -> None:
    write_safetensors(folder / "model-00003-of-00002.safetensors", {"a.weight": [3]})
    with pytest.raises(ModelError, match="one of 2 files"):
        resolve_model(str(folder / "model-00003-of-00002.safetensors"))


@pytest.mark.parametrize("index", [False, True])
def test_weights_that_lie_there_twice_count_once(folder: Path, index: bool) -> None:
    name = "model-00001-of-00001.safetensors" if index else "model.safetensors"
    write_safetensors(folder / name, {"a.weight": [3]})
    write_safetensors(folder / "consolidated.safetensors", {"tok.weight": [3]})
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    assert resolve_model(str(folder)).stored_bytes == 2 * 3


def test_an_index_whose_files_are_missing(folder: Path) -> None:
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a.weight": [3]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks 1 of 1 weight files, the first is gone\.safetensors"):
        resolve_model(str(folder))


def test_a_config_alone(folder: Path) -> None:
    source = resolve_model(str(folder / "config.json"))
    assert source.name == "tiny" and source.config == CONFIG


def test_names_of_the_catalogue_in_any_case() -> None:
    by_id = resolve_model("meta-llama/llama-3.1-8b", offline=True)
    assert by_id == resolve_model("LLAMA-3.1-8B", offline=True)
    assert by_id.config["num_hidden_layers"] == 32 and by_id.origin == "catalogue"


def test_a_name_nobody_knows_gets_near_matches() -> None:
    with pytest.raises(ModelError, match=r"Did you mean .*Llama-3\.1-8B"):
        resolve_model("meta-llama/Lama-3.1-8B", offline=True)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/config.json", "a/b/c", "x.gguf"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[1]"),
        ("config.json", b"\xff\xfe"),
        ("model.gguf", b"GGUF"),
        ("model.gguf", b"\0" * 64),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}"),
        ("model.safetensors", b"\xff" * 16),
        ("model.safetensors", b""),
    ],
)
def test_damaged_files(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError):
        resolve_model(str(folder / file))


def test_a_gguf_header_speaks_the_words_of_a_config(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(128)
    writer.add_context_length(512)
    writer.add_vocab_size(100)
    writer.add_tensor("token_embd.weight", numpy.zeros((100, 64), dtype=numpy.float16))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    source = resolve_model(str(path))
    assert source.stored_bytes == 100 * 64 * 2
    assert {name: source.config[name] for name in CONFIG} == CONFIG
