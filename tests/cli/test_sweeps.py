"""Sweeps of real trainings on two ranks each: every rank trains its own job's values."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_killed import WORDS, digits

from commands import ROOT
from lmforge.runs.rows import read_rows

# train.py, with a word from every rank.
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from lmforge.start.entry import run_front_door

def job(cfg, run):
    import importlib
    result = importlib.import_module("train_py").train(cfg, run)
    print(f"RANK {{os.environ.get('LOCAL_RANK', '0')}} job {{run.path.name}} lr {{cfg.optimizer.lr!r}}", flush=True)
    return result

run_front_door("train", job)
"""


def start(program, *words: str) -> subprocess.Popen[str]:
    (program.folder / "train.py").write_text(SCRIPT)
    (program.folder / "train_py.py").write_text((ROOT / "train.py").read_text())
    command = [sys.executable, "train.py", *program.tiny(*words)[2:]]
    environment = {**os.environ, "LMFORGE_CACHE": str(program.cache), "PYTHONPATH": str(program.folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=program.folder, env=environment, **pipes)


def sweep(program, *words: str) -> tuple[int, str]:
    process = start(program, *words)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, output


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "strategy=ddp", "optimizer.lr=1e-3,3e-4", "logger=tensorboard"],
        ["sweep=optuna", "sweep.trials=2", "strategy=fsdp", "optimizer.lr=tag(log, interval(1e-4, 1e-2))"],
    ],
    ids=["grid", "optuna"],
)
def test_two_jobs_on_two_ranks(program, words) -> None:
    code, output = sweep(program, *words, "trainer.max_steps=4", "trainer.devices=2")
    assert code == 0, output
    (folder,) = program.runs()
    assert sorted(int(item.name) for item in folder.iterdir() if item.is_dir()) == [0, 1]
    assert len(list(program.folder.rglob("config.yaml"))) == 2
    said = set(re.findall(r"^RANK (\d) job (\d) lr (\S+)$", output, flags=re.MULTILINE))
    rates = [row["optimizer.lr"] for row in rows(folder)]
    assert said == {(rank, str(job), rates[job]) for rank in "01" for job in (0, 1)}
    assert rates[0] != rates[1]
    for job, row in enumerate(rows(folder)):
        run = folder / str(job)
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert repr(config["optimizer"]["lr"]) == rates[job]
        assert [int(line["step"]) for line in read_rows(run / "metrics.csv")] == [1, 2, 3, 4]
        assert row["status"] == "done"
        assert float(row["val/loss"]) == json.loads((run / "summary.json").read_text())["val/loss"]
        if "logger=tensorboard" in words:
            assert len(list(run.rglob("events.out.tfevents.*"))) == 1
    if "-m" not in words:
        return
    scored = program(f"python evaluate.py run=default/{folder.name}/1 trainer.devices=2 strategy=ddp")
    assert scored.code == 0, scored.output
    assert "step-00000004" in scored.output


@pytest.mark.slow
def test_a_killed_sweep_ends_with_the_digits_of_a_whole_one(program) -> None:
    """kill -9 to the sweep and to the job it was at; the second call trains only what is missing."""
    words = ("-m", "seed=1,2", "trainer.max_steps=120", "callbacks.checkpoint.every_n_steps=10", *WORDS)
    assert sweep(program, *words, "sweep.folder=runs/whole")[0] == 0
    killed, whole = program.folder / "runs/killed", program.folder / "runs/whole"
    process = start(program, *words, "sweep.folder=runs/killed")
    deadline = time.monotonic() + 120
    while not list(killed.glob("1/checkpoints/step-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    os.kill(int((killed / "1" / ".lock").read_text()), signal.SIGKILL)
    assert [row["status"] for row in rows(killed)] == ["done", "running"]
    first = (killed / "0" / "job.log").read_bytes()
    code, output = sweep(program, *words, "sweep.folder=runs/killed")
    assert code == 0, output
    assert "resuming    step-" in output
    assert [row["status"] for row in rows(killed)] == ["done", "done"]
    assert (killed / "0" / "job.log").read_bytes() == first
    assert [row["val/loss"] for row in rows(killed)] == [row["val/loss"] for row in rows(whole)]
    assert [digits(killed / job) for job in "01"] == [digits(whole / job) for job in "01"]
