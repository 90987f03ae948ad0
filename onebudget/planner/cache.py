"""Plans made before, on disk: found again by everything that went into them, read without any heavy library."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from onebudget.planner.catalogue.user_files import user_folder

logger = logging.getLogger(__name__)

VARIABLE = "ONEBUDGET_CACHE_DIR"
HUB_SECONDS = 24 * 3600
"""How long what the hub said about a model is taken as true."""
_MOST_PLANS = 500
_SUFFIXES = {".py", ".json", ".toml"}
_ENVIRONMENT = ("ONEBUDGET_", "HF_HUB_OFFLINE", "HF_ENDPOINT")


def plans_folder() -> Path:
    """``plans`` under ``ONEBUDGET_CACHE_DIR``, otherwise under the user's cache folder."""
    chosen = os.environ.get(VARIABLE)
    base = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "onebudget"
    return base / "plans"


def plan_key(question: Mapping[str, Any]) -> str:
    """A digest of the question, of the model's files where it names any, of the settings in the environment, and of
    this package: an answer of other code is another answer."""
    environment = sorted((name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
    parts = {
        "question": question, "files": list(_model_files(str(question.get("model")))),
        "environment": environment, "code": _code_stamp(), "own": list(_own_files()),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def find_plan(key: str) -> dict[str, Any] | None:
    """The document stored under ``key``; None when there is none, or it is too old or damaged."""
    path = plans_folder() / f"{key}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        document: dict[str, Any] = stored["document"]
        if stored["asked_the_hub"] and time.time() - path.stat().st_mtime > HUB_SECONDS:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return document


def keep_plan(key: str, document: Mapping[str, Any], *, asked_the_hub: bool) -> None:
    """Store a document. A folder that can't be written is no error: the next plan is made anew."""
    folder = plans_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}.json"
        unfinished = path.with_suffix(f".{os.getpid()}.new")
        unfinished.write_text(json.dumps({"asked_the_hub": asked_the_hub, "document": document}), encoding="utf-8")
        unfinished.replace(path)
        _forget_oldest(folder)
    except OSError as error:
        logger.info("the plan is not kept: %s", error)


def _forget_oldest(folder: Path) -> None:
    kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in kept[:-_MOST_PLANS]:
        path.unlink(missing_ok=True)


def _model_files(model: str) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of the files a local model consists of; nothing for a name."""
    path = Path(model).expanduser()
    if not path.exists():
        return
    files = [path] if path.is_file() else [*path.glob("*.json"), *path.glob("*.safetensors")]
    yield from map(_stamp, sorted(files))


def _own_files() -> Iterator[tuple[str, int, int]]:
    folder = user_folder()
    if folder is not None:
        yield from map(_stamp, sorted([*folder.glob("gpus.toml"), *folder.glob("models/*.json")]))


def _stamp(path: Path) -> tuple[str, int, int]:
    state = path.stat()
    return str(path.absolute()), state.st_size, state.st_mtime_ns


@cache
def _code_stamp() -> str:
    """Changes with any file of this package."""
    import onebudget

    root = Path(onebudget.__file__).parent
    files = [path for path in root.rglob("*") if path.suffix in _SUFFIXES]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(repr(_stamp(path)).encode())
    return digest.hexdigest()
