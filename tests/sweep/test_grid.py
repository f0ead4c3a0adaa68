"""A grid from its words to its table, with jobs that need no torch."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmforge.config.errors import UsageError
from lmforge.config.parse import read_words
from lmforge.runs.find import all_runs, find_run
from lmforge.start.helptext import problems_text
from lmforge.sweep.planning import words_of_params
from lmforge.sweep.process import last_line
from lmforge.sweep.start import run


def sweeps(tmp_path):
    return sorted((tmp_path / "runs").glob("*/*/sweep.yaml"))


def folders(tmp_path):
    """The run folders of the jobs, by number."""
    return sorted((tmp_path / "runs").glob("*/*/[0-9]*"), key=lambda path: (path.parent, int(path.name)))


def table(tmp_path):
    (file,) = (tmp_path / "runs").glob("*/*/table.csv")
    return list(csv.DictReader(file.open()))


def test_each_job_has_a_process_and_a_folder(door, tmp_path):
    result = door("train.py", "-m", "seed=1,2", "optimizer.lr=0.5,1e-1")
    assert result.code == 0, result.err
    pairs = [(job["cfg"]["seed"], job["cfg"]["optimizer"]["lr"]) for job in result.jobs]
    assert pairs == [(1, 0.5), (1, 0.1), (2, 0.5), (2, 0.1)]
    assert not any(job["heavy"] for job in result.jobs)
    assert [Path(job["run"]) for job in result.jobs] == folders(tmp_path)
    stored = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders(tmp_path)]
    assert [(config["seed"], config["optimizer"]["lr"]) for config in stored] == pairs
    assert not any("sweep" in config for config in stored)
    assert len(sweeps(tmp_path)) == 1
    assert [(row["job"], row["seed"], row["optimizer.lr"], row["status"]) for row in table(tmp_path)] == [
        ("0", "1", "0.5", "done"), ("1", "1", "0.1", "done"), ("2", "2", "0.5", "done"), ("3", "2", "0.1", "done"),
    ]  # fmt: skip


def test_jobs_are_found_like_other_runs(door, tmp_path):
    door("train.py", "-m", "seed=1,2", "name=lrs")
    found = all_runs(tmp_path / "runs")
    assert [run.path for run in found] == folders(tmp_path)[::-1]
    assert find_run("latest", tmp_path / "runs").path == folders(tmp_path)[-1]
    sweep = sweeps(tmp_path)[0].parent
    named = find_run(f"lrs/{sweep.name}/0", tmp_path / "runs")
    assert (named.path, named.name, named.id) == (sweep / "0", "lrs", f"{sweep.name}-0")


def test_a_failing_job_does_not_stop_the_others(door, tmp_path):
    result = door("train.py", "-m", "seed=1,2,3", env={"TEST_RAISE": "RuntimeError", "TEST_RAISE_SEED": "2"})
    assert result.code == 1
    assert len(result.jobs) == 3
    rows = [line for line in result.out.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]
    assert "RuntimeError: told to fail" in rows[1]
    assert [row["status"] for row in table(tmp_path)] == ["done", "failed", "done"]
    assert table(tmp_path)[1]["reason"] == "exit 1 failed: RuntimeError: told to fail"
    logs = [folder.joinpath("job.log").read_text() for folder in folders(tmp_path)]
    assert ["Traceback" in log for log in logs] == [False, True, False]


def test_the_reason_is_what_went_wrong_and_no_advice(tmp_path):
    log = tmp_path / "job.log"
    memory = "OutOfMemory: rank 1 ran out\n  the run goes on with\n    batch.micro_sequences=8    in 2 parts\n"
    log.write_text(memory + problems_text("train", ["weights=x: not this model's"]))
    assert last_line(log, 2) == "weights=x: not this model's"
    assert last_line(log, 4) == "OutOfMemory: rank 1 ran out"
    log.write_text("\n")
    assert last_line(log, 4) == "no output"


def test_stop_on_failure(door, tmp_path):
    fail = {"TEST_RAISE": "RuntimeError", "TEST_RAISE_SEED": "2"}
    result = door("train.py", "-m", "seed=1,2,3", "sweep.stop_on_failure=true", env=fail)
    assert result.code == 1
    assert [row["status"] for row in table(tmp_path)] == ["done", "failed", "waiting"]
    assert len(folders(tmp_path)) == 2


def test_a_combination_that_cannot_be_fails_alone(door, tmp_path):
    result = door("train.py", "-m", "model.n_head=2,3,4", "model.d_model=8", "model.n_kv_head=1")
    assert result.code == 1
    assert len(result.jobs) == 2
    assert [folder.name for folder in folders(tmp_path)] == ["0", "2"]
    assert "job 1 (model.n_head=3) refused: model.n_head=3: must divide model.d_model=8" in result.err
    assert [row["status"] for row in table(tmp_path)] == ["done", "refused", "done"]
    assert "must divide" in table(tmp_path)[1]["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1,x"], "seed=x: not allowed"),
        (["strategy=ddp,fspd"], "did you mean fsdp?"),
        (["sede=1,2"], "unknown key sede"),
        (["optimizer.lr=1e-3,0.001"], "optimizer.lr=1e-3,0.001: holds 0.001 twice"),
        (["model.n_head=3,5"], "job 1 (model.n_head=5): "),
        (["seed=1,2", "optimizer.lr=fast"], "optimizer.lr=fast: not allowed"),
        (["optimizer.lr=interval(1e-4, 1e-2)"], "to search the space add sweep=optuna"),
        (["seed=1,2", "sweep.trials=3"], "sweep.trials is a key of sweep=optuna only"),
        (["seed=1,2", "sweep.jobs=1,2"], "a setting of the sweep takes one value"),
        (["seed=1,2", "sweep.metric=val/accuracy"], "type sweep.mode=max"),
        (["seed=1,2", "sweep.jobs=0"], "sweep.jobs=0: not allowed"),
        (["seed=1,2", "resume=nowhere"], "resume=nowhere: no sweep's folder"),
    ],
)
def test_wrong_values_end_the_sweep_before_it_starts(composer, tmp_path, words, said):
    read = read_words(words, composer.tree, True, problems := [])
    with pytest.raises(UsageError) as refused:
        run(composer, read, ["strategy"], problems, ["train.py"])
    assert said in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_only_train_sweeps(door):
    assert "only train.py runs sweeps" in door("evaluate.py", "-m", "ckpt=best").err


def test_a_sweep_in_the_config_files_is_not_passed_over(door, tmp_path):
    """A fork's own sweep file, chosen by a word or by the main config."""
    configs = tmp_path / "configs"
    checkout = Path(__file__).resolve().parents[2] / "configs"
    subprocess.run(["cp", "-r", checkout, configs], check=True)
    (configs / "sweep" / "mine.yaml").write_text(
        """
defaults: [grid, _self_]
params:
  optimizer: adamw
  "optimizer.lr": 1e-4,1e4
  "optimizer.betas": [[0.9, 0.95]]
  seed: [1, 2]
  model: {d_ff: 2.56e2}
"""
    )
    result = door("train.py", "sweep=mine", "seed=7")
    found = [job["cfg"] for job in result.jobs]
    values = [(cfg["optimizer"]["lr"], cfg["optimizer"]["betas"], cfg["model"]["d_ff"], cfg["seed"]) for cfg in found]
    assert values == [(1e-4, [0.9, 0.95], 256, 7), (1e4, [0.9, 0.95], 256, 7)]
    main = configs / "train.yaml"
    main.write_text(main.read_text().replace("sweep: grid", "sweep: mine"))
    assert "the config asks for a sweep" in door("train.py", "seed=7").err
    (configs / "sweep" / "mine.yaml").write_text('defaults: [grid, _self_]\nparams: {"optimizer.lr": fast}\n')
    assert "optimizer.lr=fast: not allowed" in door("train.py", "-m").err


def test_every_value_of_a_file_comes_through(composer):
    values = {
        "callbacks.samples.prompt": ["def f(a, b):", "it's \\\\' \"x\"\\\\", "a"],
        "trainer.gradient_clip_val": [None, 1.0],
        "experiment": [None, "gpt2-124m"],
        "model.qk_norm": [True, False],
    }
    words = words_of_params(composer, values, [], problems := [])
    assert not problems
    assert {word.key: list(word.values) for word in words} == values
    again = read_words([word.raw for word in words], composer.tree, True, problems)
    assert [word.values for word in again] == [word.values for word in words]


def test_the_words_of_a_job_are_read_back_as_its_values(composer):
    values = ("'x'", "null", "choice(a)", "it's", 'say "no"')
    (word,) = words_of_params(composer, {"callbacks.samples.prompt": list(values)}, [], [])
    assert word.values == values
    raw = [word.single(value).raw for value in values]
    assert [one.value for one in read_words(raw, composer.tree, False, [])] == list(values)
    assert raw[3:] == ["callbacks.samples.prompt=it's", 'callbacks.samples.prompt=say "no"']


WAITING = """
import signal, sys, time
from lmforge.start.entry import run_front_door
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


@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [
        (signal.SIGTERM, 143, False),
        (signal.SIGUSR1, 85, False),
        (signal.SIGINT, 130, False),
        (signal.SIGINT, 130, True),
    ],
)
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
    assert [row["status"] for row in table(tmp_path)] == ["interrupted", "waiting"]
    assert any(line.startswith("0    1     interrupted") for line in out.splitlines())


@pytest.mark.parametrize("words", [["-m", "seed=1,2"], ["sweep=optuna", "seed=1,2"]])
def test_no_sweep_on_every_rank_of_a_launcher(door, tmp_path, words):
    ranks = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = door("train.py", *words, env=ranks)
    assert result.code == 2
    assert "a sweep starts its jobs itself; run it without torchrun" in result.err
    assert not (tmp_path / "runs").exists()
