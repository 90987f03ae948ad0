"""Where the facts of a model come from: a folder, a file, the hub, or the catalogue. Never its weights or its code."""

from __future__ import annotations

import difflib
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onebudget.errors import ModelError
from onebudget.models.facts import read_config
from onebudget.models.files import TensorEntry, check_weight_files, read_safetensors_header, read_safetensors_table
from onebudget.planner.catalogue.models import find_model, model_names

HUB_SECONDS = 3
"""How long the hub may take to answer before the catalogue is asked."""

_PART = re.compile(r"(.*)-(\d{1,5})-of-(\d{1,5})")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's config and, where its files say so, every stored tensor.

    ``origin`` says where the facts were read, ``revision`` is the hub's commit. ``tensors`` is None when only the
    config is known.
    """

    name: str
    config: Mapping[str, Any]
    origin: str
    tensors: tuple[TensorEntry, ...] | None = None
    revision: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of all stored tensors."""
        return None if self.tensors is None else sum(tensor.nbytes for tensor in self.tensors)


def resolve_model(name: str, *, revision: str | None = None, offline: bool = False) -> ModelSource:
    """Facts of ``name``: a folder, ``config.json``, ``.safetensors`` or ``.gguf`` file, a hub id, or a name of the
    catalogue.

    A hub id is asked of the hub, config and headers only, and taken from the catalogue where there is no answer.
    Raises ``ModelError`` with near matches for a name nobody knows, and for files that are damaged.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path, name)
    if _looks_like_path(name):
        raise ModelError(f"{name} does not exist. Give a model folder, its config.json, a weights file, or a hub id.")
    reason = "it is not in the catalogue"
    if "/" in name:
        found, reason = _from_hub(name, revision, offline=offline)
        if found is not None:
            return found
    known = find_model(name)
    if known is None:
        raise ModelError(
            f"No model is known as {name!r}: {reason}.{_near(name)} `onebudget models` lists the catalogue."
        )
    notes = (f"The catalogue's facts stand for revision {revision}.",) if revision else ()
    return ModelSource(known[0], known[1], "catalogue", notes=notes)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".json", ".gguf", ".safetensors"))


def _near(name: str) -> str:
    tails = {known.rpartition("/")[2].lower(): known for known in model_names()}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), tails, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(tails[tail] for tail in close)}?" if close else ""


def _from_path(path: Path, name: str) -> ModelSource:
    if path.is_dir():
        return ModelSource(path.name, read_config(path), str(path), _folder_tensors(path))
    if path.suffix == ".gguf":
        from onebudget.planner.gguf_header import read_gguf

        parts = [read_gguf(each) for each in _parts(path)]
        return ModelSource(_whole_name(path), parts[0][0], str(path), tuple(each for part in parts for each in part[1]))
    if path.suffix == ".safetensors":
        tensors = tuple(each for part in _parts(path) for each in read_safetensors_header(part))
        return ModelSource(path.parent.name, read_config(path.parent), str(path), tensors)
    return ModelSource(_config_name(path), _config_file(path), str(path))


def _parts(path: Path) -> list[Path]:
    """The files of the model that ``path`` is a part of: one of five files is a fifth of the weights."""
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    digits, count = len(match[2]), int(match[3])
    parts = [
        path.with_name(f"{match[1]}-{number:0{digits}}-of-{match[3]}{path.suffix}") for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or path not in parts:
        raise ModelError(f"{path} is one of {count} files, and {missing[0] if missing else path.name} is not there.")
    return parts


def _whole_name(path: Path) -> str:
    match = _PART.fullmatch(path.stem)
    return match[1] if match else path.stem


def _config_name(path: Path) -> str:
    return path.parent.name if path.name == "config.json" else path.stem


def _config_file(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(
            f"{path} is no readable JSON: {error}. A config.json, .safetensors or .gguf is wanted."
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no model config: it holds no JSON object.")
    return config


def _folder_tensors(folder: Path) -> tuple[TensorEntry, ...] | None:
    """None for a folder without weights: planning needs none.

    Some folders hold the same weights twice, in shards and in one file for another library; those that the index
    lists, or ``model.safetensors``, are the model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    whole = folder / "model.safetensors"
    if whole in files and not (folder / f"{whole.name}.index.json").is_file():
        return tuple(read_safetensors_header(whole))
    return tuple(check_weight_files(folder))


def _from_hub(name: str, revision: str | None, *, offline: bool) -> tuple[ModelSource | None, str]:
    """The hub's answer, or why there is none."""
    try:
        from huggingface_hub import HfApi, constants, hf_hub_download
    except ImportError:
        return None, "huggingface-hub is not installed"
    offline = offline or constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)
    try:
        path = Path(
            hf_hub_download(name, "config.json", revision=revision, local_files_only=offline, etag_timeout=HUB_SECONDS)
        )
    except Exception as error:  # the hub's client raises a dozen kinds, of its own and of two HTTP libraries
        return None, "the hub is offline" if offline else f"the hub does not answer for it ({type(error).__name__})"
    commit = path.parent.name
    tensors = None
    if not offline:
        try:
            metadata = HfApi().get_safetensors_metadata(name, revision=commit)
        except Exception:  # a repository without safetensors, or the connection went away: the config is enough
            metadata = None
        if metadata is not None:
            tensors = tuple(
                read_safetensors_table(
                    {tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
                     for file in metadata.files_metadata.values() for tensor, info in file.tensors.items()}
                )
            )  # fmt: skip
    return ModelSource(name, _config_file(path), f"hub, revision {commit}", tensors, commit), ""


def _reachable(endpoint: str) -> bool:
    """Whether anybody listens there: the client itself would try for half a minute."""
    address = urlsplit(endpoint)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=HUB_SECONDS):
            return True
    except OSError:
        return False
