import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from lmforge.config.aside import write_aside
from lmforge.config.errors import UsageError
from lmforge.config.plain import dump_yaml
from lmforge.runs import provenance
from lmforge.runs.find import all_runs, find_auto, find_run, fingerprint
from lmforge.runs.folder import RunFolder
from lmforge.runs.going_on import continue_run, open_run

HOLD = r"""
import os, sys, time
from lmforge.runs.folder import RunFolder
run = RunFolder(sys.argv[1])
run.lock()
ready, done = os.pipe()
child = os.fork() if len(sys.argv) > 2 else -1
if child == 0:
    os.write(done, b"1")
if child > 0:
    os.read(ready, 1)
if child:
    os.write(1, f"locked {child}\n".encode())
time.sleep(60)
"""


def finish(run, steps, reason="max_steps", epochs=0, **more):
    run.summary_file.write_text(json.dumps({"steps": steps, "reason": reason, "epochs": epochs, **more}))


def test_a_new_folder_holds_the_whole_story(compose):
    run = compose.run("seed=3", "callbacks.samples.prompt=${x}, ok")
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", run.id)
    assert not set(run.id) & set("=, {}$")
    stored = yaml.safe_load(run.config_file.read_text())
    assert stored["seed"] == 3
    assert stored["precision"]["word"] in ("32-true", "bf16-mixed")
    assert stored["data"]["context"] == stored["model"]["context"]
    assert "${" not in run.config_file.read_text().replace("${x}, ok", "")
    assert run.load().callbacks.samples.prompt == "${x}, ok"
    (start,) = yaml.safe_load((run.path / "overrides.yaml").read_text())
    assert start["overrides"] == ["seed=3", "callbacks.samples.prompt=${x}, ok"]
    assert start["command"] == "train.py seed=3 'callbacks.samples.prompt=${x}, ok'"
    facts = json.loads((run.path / "provenance.json").read_text())
    assert facts["git_revision"] == "unknown" or len(facts["git_revision"]) == 40
    assert facts["packages"]["torch"]
    assert run.checkpoints.is_dir()
    assert not list(run.path.glob(".*.tmp"))


def test_runs_of_the_same_second_have_folders_of_their_own(compose):
    runs = {compose.run(f"seed={seed}").path for seed in range(6)}
    assert len(runs) == 6
    assert {RunFolder(path).load().seed for path in runs} == set(range(6))


def make_run(seed):
    plain = {"paths": {"runs": "runs"}, "name": "x", "seed": seed}
    return str(RunFolder.create(plain).path)


def test_concurrent_processes_never_share_a_folder():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        paths = pool.map(make_run, range(8))
    assert len(set(paths)) == 8
    for seed, path in enumerate(paths):
        assert yaml.safe_load(RunFolder(path).config_file.read_text())["seed"] == seed


def start_holder(run, *more):
    command = [sys.executable, "-c", HOLD, str(run.path), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    word, child = process.stdout.readline().split()
    assert word == "locked"
    return process, int(child)


def test_second_writer_is_refused_until_the_first_is_gone(compose):
    run = compose.run()
    holder, _ = start_holder(run)
    try:
        with pytest.raises(UsageError, match=f"pid {holder.pid}") as error:
            run.lock()
        assert str(run.path) in str(error.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    run.lock()
    run.unlock()


def test_a_forked_worker_that_is_left_over_does_not_hold_the_lock(compose):
    run = compose.run()
    holder, child = start_holder(run, "fork")
    try:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # still there
        run.lock()
        run.unlock()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_latest_and_names(compose, tmp_path):
    with pytest.raises(UsageError, match="no run below"):
        find_run("latest", tmp_path / "runs")
    first, second = compose.run(), compose.run()
    runs = tmp_path / "runs"
    assert find_run("latest", runs).id == second.id
    first.write_start(["resume=x"], ["train.py"], {})  # taken up again: now the newest
    assert find_run("latest", runs).id == first.id
    assert find_run(f"default/{second.id}", runs).id == second.id
    assert find_run(str(second.path), runs).id == second.id
    with pytest.raises(UsageError, match=f"did you mean .*{second.id}"):
        find_run(f"runs/defualt/{second.id}", runs)
    with pytest.raises(UsageError, match="not a run folder"):
        find_run(str(tmp_path), runs)


def test_starts_are_appended_with_what_changed(compose):
    run = compose.run()
    run.write_start(["optimizer.lr=1"], ["train.py", "optimizer.lr=1"], {"optimizer.lr": (0.02, 1.0)})
    starts = yaml.safe_load((run.path / "overrides.yaml").read_text())
    assert len(starts) == 2
    assert starts[1]["changed"] == {"optimizer.lr": {"from": 0.02, "to": 1.0}}


def test_fingerprint_is_blind_to_what_may_change(compose):
    base = fingerprint(compose.plain())
    free = ["trainer.max_steps=9", "trainer.devices=2", "strategy=fsdp", "logger=many", "compile=eager", "paths.runs=x"]
    for word in free:
        assert fingerprint(compose.plain(word)) == base, word
    for word in ["optimizer.lr=1", "seed=1", "model.n_layer=7", "batch.sequences=8", "precision=64-true", "name=x"]:
        assert fingerprint(compose.plain(word)) != base, word


def test_auto_takes_the_newest_unfinished_run_like_this(compose):
    other, old, new = compose.run("seed=1"), compose.run(), compose.run()
    plain = compose.plan().plain
    assert find_auto(plain)[0].id == new.id
    finish(new, plain["trainer"]["max_steps"])
    assert find_auto(plain)[0].id == old.id
    finish(old, plain["trainer"]["max_steps"])
    unfinished, finished = find_auto(plain)
    assert unfinished is None
    assert finished.id == new.id
    assert find_auto(compose.plan("trainer.max_steps=9999").plain)[0].id == new.id
    assert find_auto(compose.plan("seed=2").plain) == (None, None)
    assert find_auto(compose.plan("seed=1").plain)[0].id == other.id


@pytest.mark.parametrize(
    ("summary", "words", "finished"),
    [
        ((10, "max_steps"), ["trainer.max_steps=10"], True),
        ((10, "max_steps"), ["trainer.max_steps=11"], False),
        ((10, "max_epochs", 2), ["trainer.max_steps=null", "trainer.max_epochs=2"], True),
        ((10, "max_epochs", 2), ["trainer.max_steps=null", "trainer.max_epochs=3"], False),
        ((10, "max_epochs", 2), ["trainer.max_steps=100", "trainer.max_epochs=2"], True),
    ],
)
def test_finished(compose, summary, words, finished):
    run = compose.run()
    assert not run.finished(compose.plain(*words))
    finish(run, *summary)
    assert run.finished(compose.plain(*words)) is finished


@pytest.mark.parametrize(
    ("waited", "words", "keys"),
    [
        ({"early_stopping_waited": 3}, ["callbacks.early_stopping.patience=3"], ["callbacks.early_stopping.patience"]),
        ({"early_stopping_waited": 3}, ["callbacks.early_stopping.patience=4"], []),
        ({"early_stopping_waited": 3}, ["callbacks.early_stopping.patience=null"], []),
        ({"early_stopping_waited": 3}, ["callbacks.early_stopping=null"], []),
        ({}, ["callbacks.early_stopping.patience=99"], ["callbacks.early_stopping.patience"]),
        ({}, ["callbacks.early_stopping.patience=null", "trainer.max_steps=4"], ["trainer.max_steps"]),
    ],
)
def test_early_stopping_ends_a_run_while_it_would_stop_again(compose, waited, words, keys):
    run = compose.run()
    finish(run, 4, "early_stopping", **waited)
    assert run.ended_by(compose.plain(*words)) == keys


def test_the_word_at_the_end_names_what_goes_on(compose):
    run = compose.run("trainer.max_steps=null", "trainer.max_epochs=2")
    finish(run, 10, "max_epochs", 2)
    plan = compose.plan(f"resume={run.path}")
    continue_run(plan)
    assert plan.done == f"{run.path} is finished; a larger trainer.max_epochs goes on"


def test_a_start_elsewhere_is_recorded_and_said(compose, monkeypatch):
    run = compose.run()
    plan = compose.plan(f"resume={run.path}")
    open_run(plan, [], ["train.py"]).unlock()
    assert not [note for note in plan.notes if note.startswith("since the run began")]
    monkeypatch.setattr(provenance, "cpu_model", lambda: "Another CPU")
    monkeypatch.setattr(provenance, "_git", lambda folder, *words: "f" * 40)
    plan = compose.plan(f"resume={run.path}")
    open_run(plan, [], ["train.py"]).unlock()
    (line,) = [note for note in plan.notes if note.startswith("since the run began")]
    assert "-> Another CPU" in line
    facts = json.loads((run.path / "provenance.json").read_text())
    assert facts["cpu"] != "Another CPU"
    assert [later["cpu"] for later in facts["resumed"]] == [facts["cpu"], "Another CPU"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"packages": 3, "git_revision": 5, "python": [1]}', '{"resumed": 1}'])
def test_a_strangers_provenance_does_no_harm(compose, text):
    run = compose.run()
    (run.path / "provenance.json").write_text(text)
    run.write_resumed()
    assert len(json.loads((run.path / "provenance.json").read_text())["resumed"]) == 1


def test_provenance_tells_versions_and_code():
    old = {"python": "3.11.1", "git_revision": "a" * 40, "packages": {"torch": "2.12.0", "lightning": "2.6.6"}}
    new = {"python": "3.11.1", "git_revision": "b" * 40, "packages": {"torch": "2.13.0", "lightning": "2.6.6"}}
    assert provenance.differences(old, new) == ["torch 2.12.0 -> 2.13.0", f"code {'a' * 40} -> {'b' * 40}"]
    assert provenance.differences(old, {**old, "git_revision": "unknown"}) == []


BOMB = "a: &a [1]\nb: &b [*a, *a]\n"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda plain: plain["model"].update(_target_="os.system"), "model._target_=os.system"),
        (lambda plain: plain["model"].update(inner={"_target_": "logging.os.system"}), "logging.os.system"),
        (lambda plain: plain["optimizer"].update(_target_="${name}"), r"_target_=\${name}"),
        (lambda plain: plain["model"].update(surprise=1), "model.surprise=1: unknown key"),
        (lambda plain: plain["optimizer"].update(lr="fast"), "optimizer.lr=fast: not allowed"),
        (lambda plain: plain.pop("trainer"), "lacks its part trainer"),
        (lambda plain: plain.update(hydra={"x": 1}), "hydra.x=1: unknown key"),
    ],
)
def test_a_strangers_config_is_refused(compose, edit, said):
    run = compose.run()
    plain = yaml.safe_load(run.config_file.read_text())
    edit(plain)
    run.config_file.write_text(dump_yaml(plain))
    with pytest.raises(UsageError, match=said):
        run.load()


@pytest.mark.parametrize("text", [BOMB, "[1, 2]", "a: [", "!!python/object/apply:os.system ['touch marker']", "\x00"])
def test_a_strangers_yaml_is_refused(compose, text, tmp_path):
    run = compose.run()
    run.config_file.write_text(text)
    with pytest.raises(UsageError, match=r"config\.yaml"):
        run.load()
    assert not (tmp_path / "marker").exists()


def test_numbers_a_stranger_wrote_as_text_become_numbers(compose):
    run = compose.run()
    run.config_file.write_text(re.sub(r"  lr: .*", "  lr: 1e-4", run.config_file.read_text()))
    assert run.load().optimizer.lr == 0.0001


def test_readers_see_the_old_text_or_the_new(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_aside(file, "old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_aside(file, "new")
    assert file.read_text() == "old"
    assert all_runs(tmp_path) == []
