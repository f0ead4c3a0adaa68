"""`lmforge prepare` and the training that finds, or lacks, its shards."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import ROOT, run_command, start_command
from lmforge.data.shards import read_manifest
from texts import jsonl, names_of, some_text

TEXT = "data=text data.vocab_size=300"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return jsonl(tmp_path / "corpus.jsonl", [some_text(i) for i in range(60)])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Cold for every test here."""
    return tmp_path / "cache"


def _small_parts() -> None:
    from lmforge.data import spool

    spool.PART = 100_000


def _command(words: str, folder: Path, cache: Path):
    return run_command(["lmforge", *shlex.split(words)], folder, LMFORGE_CACHE=str(cache))


def _text_words(program, path: str, *more: str) -> list[str]:
    return program.tiny(*TEXT.split(), f"data.path={path}", "trainer.max_steps=2", *more)


def test_what_was_prepared_is_found_by_training(program, path, cache) -> None:
    outcome = _command(f"prepare {TEXT} data.path={path} workers=2", program.folder, cache)
    assert outcome.code == 0, outcome.output
    folder = re.search(r"^token shards in (.*)$", outcome.output, re.MULTILINE)
    assert folder is not None
    assert f"python train.py data=tokens data.path={folder[1]}" in outcome.output
    assert sum(len(names) for names in names_of(Path(folder[1])).values()) == 60
    assert not (program.folder / "runs").exists()
    again = _command(f"prepare {TEXT} data.path={path}", program.folder, cache)
    assert folder[0] in again.output
    assert "preparing" not in again.output
    trained = run_command(_text_words(program, path), program.folder, LMFORGE_CACHE=str(cache))
    assert trained.code == 0, trained.output
    assert "preparing" not in trained.output
    tokens = run_command(program.tiny(f"data.path={folder[1]}", "trainer.max_steps=2"), program.folder)
    assert tokens.code == 0, tokens.output


def test_training_has_missing_shards_made(program, path, cache) -> None:
    trained = run_command(_text_words(program, path), program.folder, LMFORGE_CACHE=str(cache))
    assert trained.code == 0, trained.output
    assert trained.output.count("preparing data=text") == 1
    assert len(list(cache.glob("tokens/text-*/manifest.json"))) == 1


def test_a_bad_row_ends_preparing_and_training(program, path, cache) -> None:
    with Path(path).open("a") as file:
        file.write('{"text": null}\n')
    said = f"  {path}:61: 'text' has to be a string, found null; data.on_bad=lenient leaves"
    for words in (["lmforge", "prepare", *TEXT.split(), f"data.path={path}"], _text_words(program, path)):
        outcome = run_command(words, program.folder, LMFORGE_CACHE=str(cache))
        assert outcome.code == 2
        assert outcome.output.count(said) == 1
        assert "Traceback" not in outcome.output
    lenient = _command(f"prepare {TEXT} data.path={path} data.on_bad=lenient", program.folder, cache)
    assert lenient.code == 0
    assert "left out: 1 text_is_null" in lenient.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data=text", ["data.path must be given"]),
        ("data=text data.path=none", ["data.path=none: no such file or folder"]),
        ("data=tokens data.path=.", ["no manifest.json"]),
        ("data=stdlib data.context=8", ["data.context says how training reads the shards"]),
        ("data=txt wrokers=2", ["did you mean text?", "did you mean workers?"]),
        ("data=stdlib workers=0", ["workers=0: not allowed"]),
        ("data=text data.path=. data.on_bad=lenent", ["did you mean lenient?"]),
        ("model=nano data=stdlib", ["model is chosen for training"]),
        ("-m data=stdlib,text", ["only train.py runs sweeps"]),
    ],
)
def test_wrong_words(tmp_path, cache, words, said) -> None:
    outcome = _command(f"prepare {words}", tmp_path, cache)
    assert outcome.code == 2
    for part in said:
        assert part in outcome.output
    assert "Traceback" not in outcome.output
    assert not cache.exists()


def test_help_and_config_are_cheap(tmp_path) -> None:
    code = (
        "import sys, lmforge.cli\ntry:\n    lmforge.cli.main()\n"
        "finally:\n    print('HEAVY', [name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    for words, said in (["--help"], "data.on_bad=lenient"), (["--cfg", "job", "--resolve"], "workers: auto"):
        command = [sys.executable, "-c", code, "prepare", "data=stdlib", *words]
        output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
        assert said in output
        assert "HEAVY []" in output
    assert not list(tmp_path.iterdir())


def test_a_kill_in_the_middle_costs_only_what_was_not_finished(program, tmp_path, cache) -> None:
    path = jsonl(tmp_path / "corpus.jsonl", [some_text(i, 3000) for i in range(60)])
    words = ["lmforge", "prepare", *TEXT.split(), f"data.path={path}", "workers=2"]
    running = start_command(words, program.folder, _small_parts, LMFORGE_CACHE=str(cache))
    running.wait_for(lambda: list(cache.glob("tokens/*.work/00000.bands.npy")))
    running.kill()
    (work,) = cache.glob("tokens/*.work")
    there = {file.name: file.stat().st_mtime_ns for file in work.glob("*.npy")}
    again = start_command(words, program.folder, _small_parts, LMFORGE_CACHE=str(cache))
    again.wait_for(lambda: len(list(work.glob("*.npy"))) > len(there) or list(cache.glob("tokens/*/manifest.json")))
    for name in there:
        file = work / name
        assert not file.exists() or file.stat().st_mtime_ns == there[name]
    outcome = again.finish()
    assert outcome.code == 0, outcome.output
    assert not again.left_behind()
    (folder,) = cache.glob("tokens/*/")
    elsewhere = _command(f"prepare {TEXT} data.path={path} workers=1", program.folder, tmp_path / "other")
    assert elsewhere.code == 0
    (other,) = (tmp_path / "other").glob("tokens/*/")
    assert other.name == folder.name
    assert read_manifest(other) == read_manifest(folder)


def test_ctrl_c_leaves_nobody(program, tmp_path, cache) -> None:
    path = jsonl(tmp_path / "corpus.jsonl", [some_text(i, 3000) for i in range(400)])
    words = ["lmforge", "prepare", *TEXT.split(), f"data.path={path}", "workers=2"]
    running = start_command(words, program.folder, _small_parts, LMFORGE_CACHE=str(cache))
    running.wait_for(lambda: list(cache.glob("tokens/*.work/00000.bands.npy")))
    os.killpg(running.process.pid, signal.SIGINT)
    began = time.monotonic()
    outcome = running.finish()
    assert outcome.code == 130, outcome.output
    assert "Traceback" not in outcome.output
    assert time.monotonic() - began < 20
    assert not running.left_behind()


@pytest.mark.slow
def test_ranks_of_lightnings_launcher_find_the_shards(program, path, cache) -> None:
    words = _text_words(program, path, "strategy=ddp", "trainer.devices=2")
    trained = run_command(words, program.folder, LMFORGE_CACHE=str(cache))
    assert trained.code == 0, trained.output
    assert trained.output.count("preparing data=text") == 1


@pytest.mark.slow
@pytest.mark.parametrize("bad", [False, True])
def test_ranks_of_torchrun_wait_for_the_shards(program, path, cache, bad) -> None:
    if bad:
        Path(path).write_text('{"text": "fine"}\nbroken\n')
    environment = {**os.environ, "LMFORGE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*launcher, str(ROOT / "train.py"), *_text_words(program, path, "strategy=ddp")[2:]]
    done = subprocess.run(
        words, cwd=program.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    output = done.stdout + done.stderr
    assert output.count("preparing data=text") == 1, output
    if not bad:
        assert done.returncode == 0, output
        return
    assert done.returncode != 0
    assert output.count(f"{path}:2: broken JSON") == 1, output
    assert set(re.findall(r"exitcode\s*: (-?\d+)", output)) <= {"2"}
