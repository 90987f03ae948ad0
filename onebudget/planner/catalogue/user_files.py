"""Where people keep entries of their own."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ONEBUDGET_CATALOGUE"


def user_folder() -> Path | None:
    """The folder with the user's ``gpus.toml`` and ``models/*.json``: what ``ONEBUDGET_CATALOGUE`` names, otherwise
    ``~/.config/onebudget``; None where there is none."""
    chosen = os.environ.get(VARIABLE)
    folder = Path(chosen).expanduser() if chosen else Path.home() / ".config" / "onebudget"
    return folder if folder.is_dir() else None
