"""What the project files promise: pins that are complete, data that is shipped, a console command that exists."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    matches = [PIN.fullmatch(line) for line in lines]
    assert all(matches), "every line is name==version: no hosts, no paths, no local versions"
    return {canonicalize_name(match[1]): Version(match[2]) for match in matches if match}


def _requirements() -> list[Requirement]:
    project = _project()
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in project["dependencies"] + extras]


def _closure() -> set[str]:
    """Names of everything the installed requirements pull in, following the installed packages' own metadata."""
    pending = [(str(canonicalize_name(r.name)), frozenset(r.extras)) for r in _requirements()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # an extra that is not installed here, such as cuda
            continue
        for requirement in map(Requirement, lines):
            environments = [{"extra": extra} for extra in extras or {""}]
            if requirement.marker is None or any(requirement.marker.evaluate(env) for env in environments):
                pending.append((str(canonicalize_name(requirement.name)), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def test_every_dependency_is_pinned() -> None:
    assert sorted(_closure() - set(_pins())) == []


def test_pins_satisfy_the_ranges() -> None:
    pins = _pins()
    wrong = [str(r) for r in _requirements() if not r.specifier.contains(pins[canonicalize_name(r.name)])]
    assert wrong == []


def test_base_has_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "fastapi", "plotly", "matplotlib"}
    assert heavy.isdisjoint(canonicalize_name(Requirement(line).name) for line in _project()["dependencies"])


def test_installed_version_is_the_projects() -> None:
    assert importlib.metadata.version("onebudget") == _project()["version"]


def test_types_are_shipped() -> None:
    assert (resources.files("onebudget") / "py.typed").is_file()


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "onebudget").rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_data_file_is_shipped() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    data = [p for p in (ROOT / "onebudget").rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}]
    forgotten = [p.name for p in data if p.name != "py.typed" and not any(p.match(pattern) for pattern in patterns)]
    assert forgotten == []


def test_console_command_exists() -> None:
    module, _, name = _project()["scripts"]["onebudget"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
