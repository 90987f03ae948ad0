"""A folder imports only from those above it, as ``docs/structure.md`` lists them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "onebudget"
HEAVY = ("torch", "transformers", "numpy", "plotly", "safetensors", "cuda")


def layers() -> list[str]:
    """First column of the table of folders, top to bottom."""
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / "docs" / "structure.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [name.rstrip("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]


LAYERS = layers()


def imports(node: ast.AST) -> Iterator[str]:
    """Top-level names of this package that ``node`` imports when it runs, inside functions too."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module == "onebudget":
        names = [f"onebudget.{alias.name}" for alias in node.names]
    else:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    yield from (name.split(".")[1] for name in names if name.startswith("onebudget."))
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def test_the_map_names_what_exists() -> None:
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    found |= {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert sorted(LAYERS) == sorted(found)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_from_above(layer: str) -> None:
    files = sorted((PACKAGE / layer).rglob("*.py")) or [PACKAGE / f"{layer}.py"]
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], "LLM"}
    if layer == "budget":
        allowed -= {"device", "buffers"}
    wrong = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        for name in imports(ast.parse(file.read_text(encoding="utf-8")))
        if name not in allowed
    }
    assert not wrong


def test_planning_works_without_the_heavy_libraries() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))\n"
        "import onebudget, onebudget.budget, onebudget.config, onebudget.cli, onebudget.device, onebudget.report.html\n"
        "onebudget.derive_budget"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
