"""What installs the project: one set of pins, floors that say why, and nothing that only one machine has."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def direct() -> list[Requirement]:
    found = [Requirement(text) for text in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def test_every_direct_dependency_is_pinned_inside_its_range() -> None:
    for requirement in direct():
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


def test_conda_environment_has_the_same_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    listed = environment["dependencies"][-1]["pip"]
    found = dict(line.split("==") for line in listed if "==" in line)
    assert found == {r.name: pins()[canonicalize_name(r.name)] for r in direct()}
    assert f"python={PROJECT['requires-python'].removeprefix('>=')}" in environment["dependencies"]


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3", "2.6.5", "2.7.0"])
def test_lightning_versions_that_must_not_be_installed(version: str) -> None:
    lightning = next(r for r in direct() if r.name == "lightning")
    assert not lightning.specifier.contains(version)


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))
    out = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
    assert targets == set(re.findall(r"^  make ([a-z-]+)", out, flags=re.MULTILINE))
