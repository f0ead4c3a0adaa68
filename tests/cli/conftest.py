"""A tiny training that every command line here starts from."""

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import ROOT, Outcome, Running, run_command, start_command
from pages import run_line

TINY = """
data=tokens model.context=32 model.n_layer=2 model.n_head=2 model.n_kv_head=1 model.d_model=32 model.d_ff=64
batch.tokens=null batch.sequences=8 optimizer=adamw trainer.max_steps=20 trainer.threads=1
trainer.log_every_n_steps=1 trainer.val_every_n_steps=5 callbacks.checkpoint.every_n_steps=5
"""


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards with a tokenizer, of 80 little texts that a network can learn."""
    from texts import prepared

    folder = tmp_path_factory.mktemp("texts")
    for number in range(80):
        words = [f"{'abcdefgh'[number * place % 8]}{place % (number + 2)}" for place in range(40 + number % 7)]
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return prepared(folder, tmp_path_factory.mktemp("cache"))


class Program:
    """train.py, evaluate.py and lmforge in a working folder of the test's own."""

    def __init__(self, folder: Path, tokens: Path, cache: Path):
        self.folder, self.tokens, self.cache = folder, tokens, cache
        self.started: list[Running] = []

    def tiny(self, *words: str) -> list[str]:
        return ["python", "train.py", *TINY.split(), f"data.path={self.tokens}", *words]

    def start(self, *words: str, changes: tuple[Callable[[], None], ...] = ()) -> Running:
        """A tiny training that is not waited for."""
        self.started.append(start_command(self.tiny(*words), self.folder, *changes, LMFORGE_CACHE=str(self.cache)))
        return self.started[-1]

    def train(self, *words: str) -> Outcome:
        return self.start(*words).finish()

    def __call__(self, line: str) -> Outcome:
        return run_command(shlex.split(line), self.folder, LMFORGE_CACHE=str(self.cache))

    def runs(self, name: str = "default") -> list[Path]:
        return sorted((self.folder / "runs" / name).glob("*"))

    def run(self, name: str = "default") -> Path:
        """The one run folder there is."""
        (only,) = self.runs(name)
        return only


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("program-cache")


@pytest.fixture
def program(tmp_path: Path, tokens: Path, cache: Path) -> Iterator[Program]:
    program = Program(tmp_path, tokens, cache)
    yield program
    for running in program.started:
        running.kill()


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as a user has it after the first run: a README, a folder of text, runs/ and .cache."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copy(ROOT / "README.md", folder)
    (folder / "corpus").mkdir()
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / "corpus")
    first = run_line("python train.py name=first", folder)
    assert first.code == 0, first.output
    return folder


@pytest.fixture(scope="module")
def workplace(first_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that folder for the commands of one page or module."""
    return Path(shutil.copytree(first_run, tmp_path_factory.mktemp("copy"), symlinks=True, dirs_exist_ok=True))
