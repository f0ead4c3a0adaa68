import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmforge.config.sweep import expand


def test_the_grid_turns_the_last_word_fastest(compose):
    jobs = expand(compose.words("seed=1,2", "name=x", "optimizer.lr=1e-3,3e-4", multirun=True))
    assert [job.swept for job in jobs] == [
        "seed=1 optimizer.lr=0.001", "seed=1 optimizer.lr=0.0003", "seed=2 optimizer.lr=0.001",
        "seed=2 optimizer.lr=0.0003",
    ]  # fmt: skip


def folders(tmp_path):
    return sorted((tmp_path / "runs" / "default").iterdir()) if (tmp_path / "runs").exists() else []


def test_each_job_has_a_process_and_a_folder(door, tmp_path):
    result = door("train.py", "-m", "seed=1,2", "optimizer.lr=0.5")
    assert result.code == 0, result.err
    assert {job["cfg"]["seed"] for job in result.jobs} == {1, 2}
    assert {job["cfg"]["optimizer"]["lr"] for job in result.jobs} == {0.5}
    assert len({job["run"] for job in result.jobs}) == len(folders(tmp_path)) == 2
    for job in result.jobs:
        assert yaml.safe_load(Path(job["run"], "config.yaml").read_text())["seed"] == job["cfg"]["seed"]
    rows = [line.split()[:3] for line in result.out.splitlines()[-2:]]
    assert rows == [["0", "seed=1", "done"], ["1", "seed=2", "done"]]


def test_a_failing_job_does_not_stop_the_others(door, tmp_path):
    result = door("train.py", "-m", "seed=1,2,3", env={"TEST_RAISE": "RuntimeError", "TEST_RAISE_SEED": "2"})
    assert result.code == 1
    assert len(result.jobs) == 3
    table = result.out.splitlines()[-3:]
    assert "done" in table[0]
    assert "failed (exit 1 failed): RuntimeError: told to fail" in table[1]
    assert "done" in table[2]
    logs = [folder.joinpath("job.log").read_text() for folder in folders(tmp_path)]
    assert sorted("Traceback" in log for log in logs) == [False, False, True]


def test_a_combination_that_cannot_be_fails_alone(door, tmp_path):
    result = door("train.py", "-m", "model.n_head=2,3,4", "model.d_model=8", "model.n_kv_head=1")
    assert result.code == 1
    assert len(result.jobs) == len(folders(tmp_path)) == 2
    assert "job 1 (model.n_head=3) refused: model.n_head=3: must divide model.d_model=8" in result.err
    assert len(result.out.splitlines()[-3:]) == 3


@pytest.mark.parametrize(
    "words",
    [["seed=1,x"], ["strategy=ddp,fspd"], ["sede=1,2"], ["model.n_head=3,5"], ["seed=1,2", "optimizer.lr=fast"]],
)
def test_wrong_values_end_the_sweep_before_it_starts(door, tmp_path, words):
    result = door("train.py", "-m", *words)
    assert result.code == 2
    assert result.jobs == []
    assert folders(tmp_path) == []


WAITING = """
import signal, sys, time
from lmforge.config.entry import run_front_door
from lmforge.config.errors import Requeue, Terminated

def job(cfg, run):
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    print("READY", flush=True)
    while not asked:
        time.sleep(0.02)
    time.sleep(0.3)
    print("ASKED", *map(int, asked), flush=True)
    raise (Requeue if asked[0] == signal.SIGUSR1 else Terminated)("saved")

run_front_door("train", job)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 85), (signal.SIGINT, 130)])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_reaches_the_running_job_once_and_ends_the_sweep(tmp_path, number, code, to_group):
    script = tmp_path / "train.py"
    script.write_text(WAITING)
    command = [sys.executable, str(script), "-m", "seed=1,2"]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while sweep.stdout.readline() != "READY\n":
            assert sweep.poll() is None
        (os.killpg if to_group else os.kill)(sweep.pid, number)
        out, _ = sweep.communicate(timeout=30)
    finally:
        sweep.kill()
    assert f"ASKED {int(number)}\n" in out
    assert sweep.returncode == code
    rows = out.splitlines()[-2:]
    assert "saved" in rows[0]
    assert f"not started ({number.name})" in rows[1]


def test_only_train_sweeps(door):
    assert "only train.py runs sweeps" in door("evaluate.py", "-m", "ckpt=best").err
