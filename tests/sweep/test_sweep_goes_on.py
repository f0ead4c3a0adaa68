"""A sweep that was cut short, called again."""

import json
import os
import signal
import subprocess
import sys

import pytest
from fake import wait_for

from lmforge.config.errors import UsageError
from lmforge.config.parse import read_words
from lmforge.runs.folder import RunFolder
from lmforge.sweep import engine
from lmforge.sweep.grid import freeze
from lmforge.sweep.planning import Planner
from lmforge.sweep.start import run

GRID = ("-m", "optimizer.lr=1e-3,3e-4,1e-4")
SEARCH = ("sweep=optuna", "sweep.trials=3", "optimizer.lr=tag(log, interval(1e-4, 1e-2))", "model.n_layer=choice(2,4)")


def starts(sweep, job):
    return [json.loads(line)["from"] for line in (sweep.path / str(job) / "seen.jsonl").read_text().splitlines()]


def points(sweep):
    keys = [key for key in sweep.table()[0] if "." in key]
    return [[row[key] for key in keys] for row in sweep.table()]


@pytest.mark.parametrize("words", [GRID, SEARCH], ids=["grid", "search"])
def test_a_killed_sweep_called_again_ends_with_the_full_table(sweep, words, tmp_path_factory):
    process = sweep.start(*words, HOLD="1")
    sweep.kill_when(process, 1, jobs_too=True)
    assert sweep.column("status")[:2] == ["done", "running"]
    output = sweep("-m", f"resume={sweep.path.relative_to(sweep.folder)}")
    assert "job 1 (" in output
    assert "goes on" in output
    assert sweep.column("status") == ["done"] * 3
    assert [starts(sweep, job) for job in range(3)] == [[0], [0, 2], [0]]
    assert "best  job" in output
    assert len({tuple(point) for point in points(sweep)}) == 3
    if words == SEARCH:
        whole = type(sweep)(tmp_path_factory.mktemp("whole"))
        whole(*words)
        assert points(whole) == points(sweep)
        assert whole.column("val/loss") == sweep.column("val/loss")


def test_the_folder_by_name_and_words_that_contradict(sweep):
    words = (*GRID, "sweep.folder=runs/lrs/first")
    process = sweep.start(*words, HOLD="0")
    sweep.kill_when(process, 0, jobs_too=True)
    said = sweep("-m", "optimizer.lr=1e-3,3e-4", "seed=1", "sweep.metric=val/bits_per_byte", words[-1], code=2)
    assert "optimizer.lr=1e-3,3e-4: this sweep began with optimizer.lr=1e-3,3e-4,1e-4" in said
    assert "seed=1: this sweep began with no word for seed" in said
    assert "sweep.metric=val/bits_per_byte: this sweep has val/loss" in said
    assert "this sweep is of kind grid" in sweep("sweep=optuna", words[-1], code=2)
    assert sweep.column("status") == ["running", "waiting", "waiting"]
    sweep(*words, code=1, FAIL="2")
    assert sweep.column("status") == ["done", "done", "failed"]
    assert starts(sweep, 0) == [0, 2]
    assert "is finished" in sweep("sweep.folder=runs/lrs/first", code=1)
    sweep("sweep.folder=runs/lrs/first", "sweep.rerun_failed=true")
    assert sweep.column("status") == ["done"] * 3
    assert starts(sweep, 1) == [0]


def test_an_end_that_was_not_noted(sweep):
    """Killed between the job's end and the table: the result is taken over, nothing is trained again."""
    sweep("-m", "seed=0")
    table = sweep.path / "table.csv"
    before = table.read_text()
    table.write_text(before.replace(",done,2.35,", ",running,,"))
    assert sweep.column("status") == ["running"]
    sweep("-m", f"resume={sweep.path}")
    assert table.read_text() == before
    assert starts(sweep, 0) == [0]


def test_resume_auto_finds_the_unfinished_sweep_of_the_same_words(sweep):
    words = ("-m", "seed=0,1", "optimizer.lr=1e-3", "resume=auto")
    process = sweep.start(*words, HOLD="0")
    wait_for(lambda: list(sweep.folder.glob("runs/*/*/0/steps")), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143, output
    assert "no unfinished sweep like this one" in output
    assert sweep.column("status") == ["interrupted", "waiting"]
    sweep("-m", "optimizer.lr=1e-3", "seed=0,1", "resume=auto")  # the same words in another order
    assert sweep.column("status") == ["done"] * 2
    assert "is finished" in sweep(*words)
    broken = sweep.folder / "runs" / "default" / "zzz"
    broken.mkdir()
    (broken / "sweep.yaml").write_text("words: 3")
    assert "passes over runs/default/zzz/sweep.yaml: " in sweep(*words)
    (broken / "sweep.yaml").unlink()
    sweep("-m", "seed=5", "resume=auto")
    assert len(list(sweep.folder.glob("runs/*/*/sweep.yaml"))) == 2


def test_config_files_that_change_meanwhile_change_no_job(sweep):
    """Frozen when the sweep begins, for jobs that are drawn later as well."""
    configs = sweep.folder / "configs"
    subprocess.run(["cp", "-r", engine.__file__.rsplit("/src/", 1)[0] + "/configs", configs], check=True)
    process = sweep.start(*SEARCH, "sweep.trials=2", "optimizer=adamw,muon", HOLD="0")
    sweep.kill_when(process, 0, jobs_too=True)
    for file in (configs / "optimizer").glob("*.yaml"):
        file.write_text(file.read_text().replace("weight_decay: ", "weight_decay: 7"))
    sweep(f"sweep.folder={sweep.path}")
    decays = [RunFolder(sweep.path / str(job)).load_plain()["optimizer"]["weight_decay"] for job in range(2)]
    assert all(decay < 7 for decay in decays), decays


def test_a_search_that_goes_on_in_another_folder_reads_the_same_text(sweep, tmp_path_factory):
    elsewhere = type(sweep)(tmp_path_factory.mktemp("elsewhere"))
    for place in (sweep, elsewhere):
        (place.folder / "text.txt").write_text(f"of {place.folder}")
    sweep(*SEARCH, "sweep.trials=1", "data=text", "data.path=text.txt")
    elsewhere(f"sweep.folder={sweep.path}", "sweep.trials=2")
    read = [RunFolder(sweep.path / str(job)).load_plain()["data"]["path"] for job in range(2)]
    assert read == [str(sweep.folder / "text.txt")] * 2


def test_a_job_never_takes_over_a_run_with_other_values(sweep):
    """As when a search whose study was lost draws again, in the order that other results came in."""
    sweep("-m", "trainer.max_steps=5,6")
    first = sweep.path
    (first / "1" / "config.yaml").rename(first / "0" / "config.yaml")
    (first / "table.csv").unlink()
    sweep(f"sweep.folder={first}", code=1)
    assert sweep.column("status") == ["failed", "done"]
    assert "the run of another job" in sweep.column("reason")[0]


def test_a_broken_summary_fails_its_job_alone(sweep):
    sweep("-m", "seed=1,2")
    (sweep.path / "table.csv").unlink()
    (sweep.path / "0" / "summary.json").write_text("{")
    sweep(f"sweep.folder={sweep.path}", code=1)
    assert sweep.column("status") == ["failed", "done"]
    assert "summary.json: cannot be read" in sweep.column("reason")[0]


def test_two_callers_of_one_sweep(sweep):
    process = sweep.start(*GRID, HOLD="0")
    wait_for(lambda: list(sweep.folder.glob("runs/*/*/0/steps")), process)
    assert "another process" in sweep(f"sweep.folder={sweep.path}", code=2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # the second one does not wait for the job to save
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_folder_that_is_something_else_is_refused(sweep):
    (sweep.folder / "things").mkdir()
    (sweep.folder / "things" / "a").touch()
    assert "holds a but no sweep" in sweep(*GRID, "sweep.folder=things", code=2)
    assert "cannot be made" in sweep(*GRID, "sweep.folder=things/a", code=2)


def job_of(plain):
    return '{"jobs": [{"words": [], "swept": {}, "reason": "", "plain": ' + plain + "}]}"


SETTINGS = "{kind: grid, metric: val/loss}"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("sweep.yaml", "words: [seed=1", "not a sweep's words and settings"),
        ("sweep.yaml", "words: {}\nsettings: {}", "not a sweep's words and settings"),
        ("sweep.yaml", "words: [3]\nsettings: {}", "not a sweep's words and settings"),
        ("sweep.yaml", "words: []\nsettings: {kind: exec}", "sweep.kind=exec: stored, but not one of grid, optuna"),
        ("sweep.yaml", "words: []\nsettings: {kind: grid, jobs: many}", "sweep.jobs=many: not allowed"),
        ("frozen.json", "{", "cannot be read"),
        ("frozen.json", '{"jobs": [{"word": 1}]}', "frozen configs are broken"),
        ("frozen.json", '{"jobs": 3}', "cannot be read"),
        ("frozen.json", '{"bases": []}', "frozen configs are broken"),
        ("frozen.json", job_of('{"task": {"_target_": "os.system"}}'), "os.system"),
        ("table.csv", "job,status\nx,done\n", "not a sweep's table"),
        ("table.csv", "job\n0\n", "not a sweep's table"),
        ("table.csv", "job,status,reason,seconds,val/loss\n0,gone,,1,2\n", "the row of job 0 is broken"),
    ],
)
def test_broken_files_of_a_sweep(composer, tmp_path, file, text, said):
    """Named, not a traceback; nothing is started."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    job = json.dumps(freeze([Planner(composer, [], ()).job(0, [])]))
    stored = {"sweep.yaml": f"words: []\nsettings: {SETTINGS}\n", "frozen.json": job, "table.csv": ""} | {file: text}
    for name, content in stored.items():
        (folder / name).write_text(content)
    words = read_words([f"sweep.folder={folder}"], composer.tree, True, [])
    with pytest.raises(UsageError) as refused:
        run(composer, words, (), [], ["train.py"])
    assert said in str(refused.value)


HOLDER = "import sys, time; from lmforge.runs.folder import RunFolder; RunFolder('.').lock(); print(flush=True); "


def test_waits_for_a_job_that_outlived_its_sweep(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", HOLDER + "time.sleep(1)"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        monkeypatch.setattr(engine, "HOLD", 0.0)
        with pytest.raises(UsageError, match=str(holder.pid)):
            engine._wait_until_free(RunFolder(tmp_path), engine.Stop())
        monkeypatch.setattr(engine, "HOLD", 30.0)
        engine._wait_until_free(RunFolder(tmp_path), engine.Stop())
    assert os.path.exists(tmp_path / ".lock")
