from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onebudget.devtools.tiny_models import TinyKind, tiny_model

TinyFolder = Callable[[TinyKind], Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """The folder of a tiny model of a kind, written once."""
    folders: dict[TinyKind, Path] = {}

    def folder(kind: TinyKind) -> Path:
        if kind not in folders:
            folders[kind] = tiny_model(kind, tmp_path_factory.mktemp(kind))
        return folders[kind]

    return folder
