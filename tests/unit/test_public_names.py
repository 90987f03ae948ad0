"""The flat public root: what type checkers see is what the lazy imports give, and all of it exists."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import onebudget


def test_type_checkers_and_users_see_the_same_names() -> None:
    tree = ast.parse(Path(onebudget.__file__).read_text())
    seen = {
        name.name: statement.module.removeprefix("onebudget.")
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for name in statement.names
    }
    assert seen == onebudget._HOMES
    assert list(onebudget.__all__) == sorted(seen)


def test_every_public_name_exists() -> None:
    assert all(getattr(onebudget, name) is not None for name in onebudget.__all__)


def test_the_root_and_the_pure_parts_import_no_heavy_library() -> None:
    code = (
        "import sys, onebudget, onebudget.config, onebudget.cli.app\n"
        "from onebudget import derive_budget, BudgetConfig, Ledger, open_device, split_budget\n"
        "open_device('fake', capacity_bytes=2**20).close()\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'plotly', 'matplotlib'}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
