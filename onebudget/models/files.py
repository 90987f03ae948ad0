"""Model files: find the folder, and check that its weights are whole before anything reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebudget.errors import ModelError

_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def resolve_model(model: str | Path, *, revision: str | None = None, offline: bool = False) -> Path:
    """A local folder as it is; otherwise a hub id, fetched into the hub's cache (weights, config, tokenizer).

    Raises ``ModelError`` when the id can't be fetched and is not cached.
    """
    path = Path(model).expanduser()
    if path.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(model), revision=revision, allow_patterns=_PATTERNS, local_files_only=offline)
        )
    except Exception as error:
        raise ModelError(
            f"{model} is neither a local folder nor a hub model that can be fetched here ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Give a local folder, check the name, or go online once to fill the cache."
        ) from error


def read_safetensors_header(path: Path) -> list[TensorEntry]:
    """Tensors declared by a file's header; ``ModelError`` when the header or the data behind it is incomplete."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelError(f"{path} has {size} bytes and no safetensors header: it is truncated. Fetch it again.")
        (header_bytes,) = struct.unpack("<Q", prefix)
        header = _parse_header(path, file.read(min(header_bytes, size)), header_bytes, size)
    entries = _entries(path, header)
    expected = 8 + header_bytes + sum(entry.nbytes for entry in entries)
    if size != expected:
        problem = "truncated" if size < expected else "damaged"
        raise ModelError(
            f"{path} is {problem}: its header declares {expected:,} bytes and the file has {size:,} "
            f"({abs(expected - size):,} {'missing' if size < expected else 'too many'}). Fetch it again."
        )
    return entries


def _entries(path: Path, header: dict[str, Any]) -> list[TensorEntry]:
    """Tensors in the order of the header. Their data must lie one behind the other, without overlap or hole."""
    try:
        entries = read_safetensors_table(header)
        spans = {entry.name: tuple(int(offset) for offset in header[entry.name]["data_offsets"]) for entry in entries}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path} has a damaged safetensors header ({error!r}). Fetch it again.") from error
    reached = 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if start != reached or end < start:
            raise ModelError(
                f"{path} has a damaged safetensors header: {name} lies at bytes {start:,} to {end:,}, expected from "
                f"{reached:,}. Fetch it again."
            )
        reached = end
    return entries


def read_safetensors_table(header: Mapping[str, Any]) -> list[TensorEntry]:
    """Tensors of a parsed header, in its order; ``KeyError``, ``TypeError`` or ``ValueError`` for a damaged one."""
    entries = []
    for name, info in header.items():
        if name != "__metadata__":
            start, end = (int(offset) for offset in info["data_offsets"])
            entries.append(TensorEntry(name, str(info["dtype"]), tuple(map(int, info["shape"])), end - start))
    return entries


def _parse_header(path: Path, raw: bytes, header_bytes: int, size: int) -> dict[str, Any]:
    try:
        if len(raw) < header_bytes:
            raise ValueError(f"header of {header_bytes:,} bytes in a file of {size:,}")
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise ValueError("header is no JSON object")
    except ValueError as error:
        raise ModelError(f"{path} is no usable safetensors file ({error}). Fetch it again.") from error
    return header


def check_weight_files(folder: Path) -> list[TensorEntry]:
    """Every tensor of the folder's safetensors files, each file checked to be whole."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(map(str, set(json.loads(index.read_text())["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a usable weight index ({error}). Fetch it again.") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}.")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors file: weights in other formats are not loaded.")
    return [entry for file in files for entry in read_safetensors_header(file)]
