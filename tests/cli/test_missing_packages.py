"""Without its package a feature ends with one line that says what to install; everything else goes on working.

A new feature joins with a row of `FEATURES`, and with its package in `lmforge.config.optional`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from commands import ROOT, start_command
from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.optional import EXTRAS, check_packages, require
from lmforge.config.parse import Tree, read_words
from optional_packages import block

# The words that ask for a feature, the package it needs, the extra that brings it.
FEATURES = [
    ("train.py logger=wandb", "wandb", ""),
    ("train.py logger=tensorboard", "tensorboard", ""),
    ("train.py sweep=optuna optimizer.lr=interval(1e-4,1e-2)", "optuna", "sweep"),
    ("train.py data=hub data.name=set", "datasets", "data"),
    ("train.py strategy=deepspeed optimizer=adamw trainer.devices=2", "deepspeed", "deepspeed"),
    ("lmforge prepare data=text data.path=set/a.parquet", "pyarrow", "data"),
    ("lmforge prepare data=text data.path=set/a.txt.zst", "zstandard", "data"),
]


@pytest.mark.parametrize(("line", "package", "extra"), FEATURES)
def test_a_feature_without_its_package(tmp_path: Path, line: str, package: str, extra: str) -> None:
    words = line.split()
    words = ["python", *words] if words[0].endswith(".py") else words
    (tmp_path / "set").mkdir()
    for name in ("a.parquet", "a.txt.zst"):
        (tmp_path / "set" / name).touch()
    outcome = start_command(words, tmp_path, partial(block, package)).finish(60)
    assert outcome.code == 2, outcome.output
    install = f"pip install -e '.[{extra}]'" if extra else "pip install -e '.'"
    (said,) = [line for line in outcome.output.splitlines() if package in line and "needs the package" in line]
    assert said.endswith(f": needs the package {package}, which is not installed: {install}")
    assert "Traceback" not in outcome.output
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.parametrize(("line", "package", "extra"), FEATURES)
def test_its_config_still_composes(line: str, package: str, extra: str) -> None:
    tree, problems = Tree(ROOT / "configs"), []
    words = read_words([word for word in line.split() if "=" in word], tree, True, problems)
    composed = Composer("train", tree).compose(words)
    assert problems == [] == list(composed.problems)


def test_the_core_trains_without_any_of_them(tmp_path: Path, tokens: Path) -> None:
    """In an interpreter of its own, which has imported nothing yet."""
    script = (
        f"import sys, runpy; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        f"from optional_packages import block; block(*{sorted(EXTRAS)!r})\n"
        f"sys.argv = [{str(ROOT / 'train.py')!r}, *sys.argv[1:]]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = f"debug=fast data=tokens data.path={tokens} trainer.threads=1 trainer.max_steps=2".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/*/summary.json"))


def test_every_package_is_in_the_extra_that_is_named() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
        assert any(line.startswith(f"{package}>") for line in listed), package


def test_what_is_off_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmforge.config.optional.find_spec", lambda name: None)
    check_packages({"logger": {"wandb": None, "csv": {"_target_": "x"}}})
    check_packages({"logger": None})


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "no_such_package", "data")
    with pytest.raises(UsageError, match=r"data=x: needs the package no_such_package, .*: pip install -e '\.\[data\]'"):
        require("no_such_package", "data=x")
