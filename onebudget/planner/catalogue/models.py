"""Configurations of well-known models: facts, one file each, in the form of their ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onebudget.errors import ModelError
from onebudget.planner.catalogue.user_files import user_folder


def model_names() -> list[str]:
    """Hub ids of the catalogue, the user's own entries among them, sorted."""
    return sorted({**_built_in(), **_user_models()}, key=str.lower)


def find_model(name: str) -> tuple[str, dict[str, Any]] | None:
    """``(hub id, config)`` of a model by its hub id or the part behind the slash, in any case; None when unknown."""
    known = {**_built_in(), **_user_models()}
    wanted = name.strip().lower()
    for model_id in known:
        if wanted == model_id.lower():
            return model_id, _config(known[model_id])
    for model_id in sorted(known):
        if wanted == model_id.lower().rpartition("/")[2]:
            return model_id, _config(known[model_id])
    return None


def _config(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} is no model config: it holds no JSON object.")
    return {name: value for name, value in document.items() if not name.startswith("_")}


@cache
def _built_in() -> dict[str, Path]:
    folder = Path(str(resources.files("onebudget.planner.catalogue").joinpath("models")))
    return dict(_entries(folder))


def _user_models() -> dict[str, Path]:
    folder = user_folder()
    models = None if folder is None else folder / "models"
    return dict(_entries(models)) if models is not None and models.is_dir() else {}


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """A file's name is the hub id with ``__`` for the slash."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem.replace("__", "/", 1), path
