"""Ledger JSON read back from a file, checked where it enters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from onebudget.budget.ledger import SCHEMA, Ledger
from onebudget.errors import ConfigError

Bytes = Annotated[int, Field(ge=0, strict=True)]


class _MeasuredTerm(BaseModel):
    name: str
    bytes: Bytes
    peak_bytes: Bytes | None = None


class _MeasuredKVCache(BaseModel):
    bytes: Bytes
    peak_bytes: Bytes | None = None


class _Measured(BaseModel):
    terms: list[_MeasuredTerm] = []
    kv_cache: _MeasuredKVCache | None = None
    unassigned_bytes: Bytes = 0


class _RunExtras(BaseModel):
    """What a run adds to its ledger, as far as the report relies on it."""

    measured: _Measured | None = None
    requests: list[dict[str, Any]] = []
    throughput: dict[str, Any] = {}
    counters: dict[str, Any] = {}


def read_document(path: Path) -> dict[str, Any]:
    """The ledger in ``path``, with whatever a run added to it.

    Raises ``ConfigError`` when the file can't be read, is not JSON, is not a ledger, or does not add up.
    """
    try:
        return check_document(json.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}.", field="file", value=str(path)) from error
    except UnicodeDecodeError as error:
        raise _unusable(path, "it is not text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise _unusable(path, f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise _unusable(path, "its JSON is nested too deeply") from error
    except ConfigError as error:
        raise _unusable(path, str(error)) from error


def check_document(document: object) -> dict[str, Any]:
    """The document with the ledger's defaults filled in. ``ConfigError`` unless it is a ledger that adds up."""
    if not isinstance(document, dict):
        raise ConfigError(f"it holds a JSON {_json_kind(document)}, not an object")
    ledger = Ledger.from_dict(document)
    try:
        _RunExtras.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"{where}: {first['msg']}", field=where) from error
    return {**document, **ledger.to_dict()}


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a usable ledger: {reason.rstrip('.')}. A ledger is what `onebudget run --json` prints.",
        field="file",
        value=str(path),
        allowed=f"JSON of schema {SCHEMA}",
    )


def _json_kind(value: object) -> str:
    kinds = {list: "list", str: "text", bool: "flag", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)
