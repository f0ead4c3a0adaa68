"""With nothing but the core dependencies: every module imports, every config composes, training runs."""

import importlib.metadata
import re
import shlex
import sys
import tomllib
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from commands import ROOT, start_command
from pages import FAST

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROBE = """
import importlib, pkgutil, sys
from pathlib import Path
import {package}
from {package}.config.compose import Composer
from {package}.config.parse import Tree, Word

for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    importlib.import_module(module.name)
tree = Tree(Path(sys.argv[1]))
composer = Composer("train", tree)
for group in composer.groups():
    for choice in tree.groups[group]:
        composer.base([Word(group, (choice,), "", group=True)])
print("all imported")
"""


def optional_modules() -> set[str]:
    """Import names of what only an extra installs."""
    extras = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    named = {re.split(r"[\[<>=]", text)[0] for text in extras} - {PROJECT["name"]}
    owned = importlib.metadata.packages_distributions()
    return {module for module, owners in owned.items() if named & {owner.replace("_", "-") for owner in owners}}


class Blocker(MetaPathFinder):
    """Finds none of the optional modules, as if they were not installed."""

    def __init__(self, names: set[str]):
        self.names = names

    def find_spec(self, name: str, *rest: Any) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_extras() -> None:
    """In a process of its own: what is optional is gone, and the project's package is imported anew."""
    names = optional_modules()
    package = next((ROOT / "src").iterdir()).name
    for name in list(sys.modules):
        if name.partition(".")[0] in names | {package}:
            del sys.modules[name]
    sys.meta_path.insert(0, Blocker(names))


def test_the_core_stands_alone(workplace: Path) -> None:
    assert {"optuna", "datasets", "pyarrow", "zstandard", "pytest"} <= optional_modules()
    package = next((ROOT / "src").iterdir()).name
    (workplace / "probe.py").write_text(PROBE.format(package=package))
    words = ["python", str(workplace / "probe.py"), str(ROOT / "configs")]
    outcome = start_command(words, workplace, without_extras).finish()
    assert outcome.code == 0, outcome.output
    assert "all imported" in outcome.output
    for line in ("python train.py name=core", "python evaluate.py run=latest limit_batches=1"):
        words = [*shlex.split(line), *(FAST if "train.py" in line else ())]
        outcome = start_command(words, workplace, without_extras).finish()
        assert outcome.code == 0, outcome.output


def test_the_blocker_blocks(workplace: Path) -> None:
    (workplace / "needs.py").write_text("import optuna\n")
    outcome = start_command(["python", str(workplace / "needs.py")], workplace, without_extras).finish()
    assert "No module named 'optuna'" in outcome.output
    assert outcome.code != 0
