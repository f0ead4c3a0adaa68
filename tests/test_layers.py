"""Imports run one way: what evaluates and exports knows what trains, never the other way round."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lmforge"
ABOVE = ("lmforge.evaluation", "lmforge.export", "lmforge.cli")


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ["config", "data", "models", "parallel", "tasks", "training"])
def test_what_trains_imports_nothing_from_above(package) -> None:
    files = sorted((SOURCE / package).glob("*.py"))
    assert files
    upward = [f"{file.name}: {name}" for file in files for name in imported(file) if name.startswith(ABOVE)]
    assert not upward


def test_networks_know_nobody() -> None:
    names = {name for file in (SOURCE / "models").glob("*.py") for name in imported(file)}
    assert "lmforge.models.attention.attend" in names
    assert not [name for name in names if name.startswith("lmforge.") and not name.startswith("lmforge.models.")]
