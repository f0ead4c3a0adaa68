"""A front door whose job only reports what it was given, so that no test here needs torch."""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmforge.config.compose import Composer
from lmforge.config.launch import RANK_VARIABLES, Launch
from lmforge.config.parse import Tree, Word, read_words
from lmforge.runs.folder import RunFolder
from lmforge.runs.going_on import continue_run, open_run
from lmforge.runs.plan import Plan, plan_train

CHECKOUT = Path(__file__).resolve().parents[1]
DOOR = """
import json, os, sys
from pathlib import Path
from lmforge.config import errors
from lmforge.config.plain import to_plain
from lmforge.start.entry import run_front_door

def job(cfg, run):
    heavy = [name for name in ("torch", "lightning", "numpy") if name in sys.modules]
    print("JOB " + json.dumps({"cfg": to_plain(cfg), "run": str(run.path), "heavy": heavy}))
    raise_named = os.environ.get("TEST_RAISE")
    if raise_named and int(os.environ.get("TEST_RAISE_SEED", cfg.seed)) == cfg.seed:
        raise getattr(errors, raise_named, RuntimeError)("told to fail")

run_front_door(Path(sys.argv[0]).stem, job)
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """Each test works in a folder of its own, as if no launcher had started it."""
    for name in (*RANK_VARIABLES, "LMFORGE_RUN", "LMFORGE_CONFIG", "LMFORGE_CACHE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tree() -> Tree:
    return Tree(CHECKOUT / "configs")


@pytest.fixture(scope="session")
def composer(tree) -> Composer:
    return Composer("train", tree)


@dataclass
class Compose:
    """Composes typed words in this process."""

    composer: Composer

    def words(self, *typed: str, multirun: bool = False) -> list[Word]:
        problems: list[str] = []
        words = read_words(typed, self.composer.tree, multirun, problems)
        assert not problems
        return words

    def plain(self, *typed: str) -> dict:
        composed = self.composer.compose(self.words(*typed))
        assert not composed.problems
        return composed.plain

    def plan(self, *typed: str, launch: Launch | None = None) -> Plan:
        return plan_train(self.composer, self.words(*typed), (), launch or Launch())

    def run(self, *typed: str) -> RunFolder:
        """A run folder as train.py would leave it at its start, unlocked."""
        plan = self.plan(*typed)
        continue_run(plan)
        run = open_run(plan, typed, ["train.py", *typed])
        run.unlock()
        return run


@pytest.fixture
def compose(composer) -> Compose:
    return Compose(composer)


@dataclass
class Result:
    code: int
    out: str
    err: str
    wall: float
    cpu: float

    @property
    def jobs(self) -> list[dict]:
        return [json.loads(line[4:]) for line in self.out.splitlines() if line.startswith("JOB ")]


@dataclass
class Door:
    """Runs train.py, evaluate.py or generate.py of the test's folder in a process of its own."""

    folder: Path

    def write(self, script: str, before: str = "") -> Path:
        """Writes the script, with lines of the test's own run first."""
        path = self.folder / script
        path.write_text(before + DOOR, encoding="utf-8")
        return path

    def __call__(self, script: str, *words: str, env: dict[str, str] | None = None) -> Result:
        path = self.write(script)
        environ = {**os.environ, **(env or {})}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, path, *words], capture_output=True, text=True, cwd=self.folder, env=environ, timeout=60
        )
        wall = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Result(done.returncode, done.stdout, done.stderr, wall, cpu)


@pytest.fixture
def door(tmp_path) -> Door:
    return Door(tmp_path)
