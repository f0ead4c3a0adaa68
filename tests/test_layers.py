"""Imports run one way: a package knows those below it, so that no two know each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lmforge"
# Each package with those of the others that it knows.
KNOWS = {
    "models": set(),
    "config": set(),
    "parallel": {"config"},
    "data": {"config"},
    "runs": {"config"},
    "sweep": {"config", "runs"},
    "soak": {"config", "runs"},
    "start": {"config", "runs", "sweep", "parallel"},
    "tasks": {"config", "data", "models", "parallel"},
    "training": {"config", "data", "parallel", "runs", "tasks"},
    "evaluation": {"config", "data", "parallel", "runs", "tasks", "training"},
    "export": {"config", "data", "runs", "training"},
}
HEAVY = ("torch", "lightning")


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def others(package: str) -> set[str]:
    names = {name for file in (SOURCE / package).glob("*.py") for name in imported(file)}
    return {name.split(".")[1] for name in names if name.startswith("lmforge.")} - {package}


def test_every_package_has_its_place() -> None:
    assert {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()} == set(KNOWS)


@pytest.mark.parametrize("package", KNOWS)
def test_a_package_knows_those_below_it(package) -> None:
    assert others(package) <= KNOWS[package]


def test_nobody_is_below_itself() -> None:
    left = dict(KNOWS)
    while lowest := [package for package, known in left.items() if not known & left.keys()]:
        for package in lowest:
            del left[package]
    assert not left


@pytest.mark.parametrize("package", ["config", "runs", "soak", "sweep", "start"])
def test_what_runs_before_torch_does_not_import_it(package) -> None:
    names = [name for file in (SOURCE / package).glob("*.py") for name in imported(file)]
    assert names
    assert not [name for name in names if name.split(".")[0] in HEAVY]
