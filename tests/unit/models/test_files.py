from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebudget.errors import ModelError
from onebudget.models.files import TensorEntry, check_weight_files, read_safetensors_header, resolve_model

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
}
DATA = bytes(range(34))


def weights(path: Path, header: object = None, data: bytes = DATA, *, raw: bytes | None = None) -> Path:
    raw = json.dumps(HEADER if header is None else header).encode() if raw is None else raw
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_entries_of_a_whole_file(tmp_path: Path) -> None:
    entries = read_safetensors_header(weights(tmp_path / "w.safetensors"))
    assert entries == [TensorEntry("a", "F32", (2, 3), 24), TensorEntry("b", "BF16", (5,), 10)]


@pytest.mark.parametrize("cut", range(1, 34))
def test_any_missing_byte_of_data_is_counted(tmp_path: Path, cut: int) -> None:
    path = weights(tmp_path / "w.safetensors", data=DATA[:-cut])
    with pytest.raises(ModelError, match=rf"truncated: .*\({cut} missing\)\. Fetch it again"):
        read_safetensors_header(path)


def test_bytes_too_many_are_counted(tmp_path: Path) -> None:
    path = weights(tmp_path / "w.safetensors", data=DATA + b"123")
    with pytest.raises(ModelError, match=r"damaged: .*\(3 too many\)"):
        read_safetensors_header(path)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_file_shorter_than_its_length_field(tmp_path: Path, length: int) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"x" * length)
    with pytest.raises(ModelError, match=f"has {length} bytes and no safetensors header"):
        read_safetensors_header(path)


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"null", b"\xff\xff", b'"a"', b""])
def test_a_header_that_is_no_json_object(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ModelError, match="no usable safetensors file"):
        read_safetensors_header(weights(tmp_path / "w.safetensors", raw=raw))


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ModelError, match="in a file of 10"):
        read_safetensors_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        5, {}, {"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": None, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]}, {"dtype": "F32", "shape": [1], "data_offsets": "ab"},
    ],
)  # fmt: skip
def test_an_entry_of_the_wrong_form_is_a_model_error(tmp_path: Path, entry: object) -> None:
    with pytest.raises(ModelError):
        read_safetensors_header(weights(tmp_path / "w.safetensors", {**HEADER, "c": entry}))


@pytest.mark.parametrize("offsets", [[10, 34], [1000, 1024], [-24, 0]])
def test_tensors_that_overlap_or_lie_outside_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    entry = {**HEADER["a"], "data_offsets": offsets}
    with pytest.raises(ModelError):
        read_safetensors_header(weights(tmp_path / "w.safetensors", {**HEADER, "a": entry}))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 300), byte=st.integers(0, 255))
def test_one_damaged_byte_never_ends_in_another_error(tmp_path: Path, at: int, byte: int) -> None:
    path = weights(tmp_path / "w.safetensors")
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content)
    with suppress(ModelError):
        read_safetensors_header(path)


# -- folders ------------------------------------------------------------------------------------------------------


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_all_files_of_a_folder(tmp_path: Path) -> None:
    weights(tmp_path / "model-1.safetensors")
    weights(tmp_path / "model-2.safetensors", {"c": HEADER["a"]}, DATA[:24])
    assert [entry.name for entry in check_weight_files(tmp_path)] == ["a", "b", "c"]


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    weights(tmp_path / "one.safetensors")
    weights(tmp_path / "other.safetensors", raw=b"broken")
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert [entry.name for entry in check_weight_files(tmp_path)] == ["a", "b"]


def test_a_missing_shard_is_named_and_counted(tmp_path: Path) -> None:
    weights(tmp_path / "model-1.safetensors")
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"})
    with pytest.raises(ModelError, match=r"lacks 2 of 3 weight files, the first is model-2\.safetensors"):
        check_weight_files(tmp_path)


def test_one_broken_shard_is_enough(tmp_path: Path) -> None:
    weights(tmp_path / "model-1.safetensors")
    weights(tmp_path / "model-2.safetensors", data=b"")
    with pytest.raises(ModelError, match=r"model-2\.safetensors is truncated"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": null}'])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    weights(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="not a usable weight index"):
        check_weight_files(tmp_path)


def test_an_index_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    index(tmp_path, {"a": 5})
    with pytest.raises(ModelError):
        check_weight_files(tmp_path)


def test_weights_in_other_formats_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        check_weight_files(tmp_path)


# -- names --------------------------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["gone", "./gone/model", "/gone/model", "a/b/c", "~/gone"])
def test_what_can_only_be_a_path_is_never_fetched(name: str) -> None:
    assert resolve_model(name) == Path(name).expanduser()


def test_a_hub_name_that_cannot_be_fetched_offers_ways_out() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ModelError, match=r"nobody/nothing is neither a local folder nor .*Give a local folder"):
        resolve_model("nobody/nothing", offline=True)
