"""`lmforge runs`: what is told of each run folder, and that nothing but a run that was meant is ever removed."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmforge.config.errors import UsageError
from lmforge.runs.facts import ago, disk_bytes, list_runs, read_run, size
from lmforge.runs.find import all_runs, find_run
from lmforge.runs.folder import RunFolder
from lmforge.runs.removal import find_doomed, remove_run

COMMAND = [sys.executable, "-c", "from lmforge.cli import main; main()", "runs"]


def runs_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)


def checkpoint(run: RunFolder, step: int, total: int, **metrics: float) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    state = {"format": 1, "step": step, "total_steps": total, "metrics": metrics, "files": []}
    (folder / "state.json").write_text(json.dumps(state))


def finish(run: RunFolder, steps: int, reason: str = "max_steps", **metrics: float) -> None:
    (run.path / "metrics.csv").write_text(f"step,train/loss\n1,3.0\n{steps},2.0\n")
    run.summary_file.write_text(json.dumps({"steps": steps, "epochs": 0.1, "reason": reason, **metrics}))


def only(runs: str = "runs"):
    (facts,) = list_runs(Path(runs))
    return facts


def test_a_new_run_has_done_nothing(compose) -> None:
    run = compose.run("trainer.max_steps=7")
    facts = only()
    assert (facts.label, facts.state) == (f"default/{run.id}", "unfinished")
    assert (facts.steps, facts.planned, facts.metric) == (None, 7, None)
    assert facts.disk >= sum(file.stat().st_size for file in run.path.glob("*"))
    assert time.time() - facts.active < 60


def test_a_finished_run_shows_its_reason_and_its_metric(compose) -> None:
    finish(compose.run("trainer.max_steps=7"), 7, **{"val/bits_per_byte": 1.25, "val/loss": 2.0})
    facts = only()
    assert (facts.state, facts.steps, facts.planned) == ("finished (max_steps)", 7, 7)
    assert (facts.metric, facts.value) == ("val/bits_per_byte", 1.25)


def test_a_finished_run_that_was_given_more_to_do_is_unfinished(compose) -> None:
    run = compose.run("trainer.max_steps=9")
    finish(run, 7)
    checkpoint(run, 8, 9)
    facts = only()
    assert (facts.state, facts.steps, facts.planned) == ("unfinished", 8, 9)


def test_an_unfinished_run_stands_at_its_checkpoint_not_at_its_log(compose) -> None:
    run = compose.run("trainer.max_steps=20")
    checkpoint(run, 5, 20, **{"val/loss": 2.5})
    checkpoint(run, 10, 20)
    (run.path / "metrics.csv").write_text("step,train/loss\n12,2.0\n13,2")
    facts = only()
    assert (facts.state, facts.steps, facts.metric, facts.value) == ("unfinished", 10, "val/loss", 2.5)


def test_epochs_are_planned_once_a_checkpoint_knows_them(compose) -> None:
    run = compose.run("trainer.max_steps=null", "trainer.max_epochs=2")
    assert only().planned is None
    checkpoint(run, 5, 33)
    assert only().planned == 33


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (85, "preempted"),
        (143, "preempted"),
        (4, "failed, out of memory"),
        (3, "failed, not finite"),
        (99, "failed (99)"),
    ],
)
def test_how_a_run_ended(compose, code, state) -> None:
    (compose.run().path / "exit_code").write_text(f"{code}\n")
    assert only().state == state


def test_a_run_at_work_is_shown_and_not_deleted(compose) -> None:
    run = compose.run()
    (run.path / "metrics.csv").write_text("step,train/loss\n3,2.0\n")
    run.lock()
    facts = only()
    assert (facts.state, facts.steps) == (f"running (pid {os.getpid()})", 3)
    with pytest.raises(UsageError, match=r"running \(pid \d+\); stop it first"):
        find_doomed(facts.label, Path("runs"))
    with pytest.raises(UsageError, match="another process"):  # and if it was started in between
        remove_run(RunFolder(run.path), Path("runs"))
    run.unlock()
    assert only().state == "unfinished"


def test_looking_does_not_keep_a_run_from_starting(compose) -> None:
    run = compose.run()
    for _ in range(50):
        only()
        run.lock()
        run.unlock()


def broken_folders(run: RunFolder) -> None:
    """Copies of a run, each spoilt in another way, and folders that never were runs."""
    harms = {
        "binary": b"\xff\xfe\x00",
        "list": b"- 1\n",
        "alias": b"a: &a [1]\nb: *a\n",
        "deep": b"[" * 5000,
        "no": b"",
    }
    for name, content in harms.items():
        shutil.copytree(run.path, run.path.parent / name)
        (run.path.parent / name / "config.yaml").write_bytes(content)
    spoilt = run.path.parent / "spoilt"
    shutil.copytree(run.path, spoilt)
    for file in ("summary.json", "metrics.csv", "exit_code"):
        (spoilt / file).write_bytes(b"\x00[nonsense\n,,,")
    (spoilt / "checkpoints" / "step-00000003").mkdir()
    (spoilt / "checkpoints" / "step-00000003" / "state.json").write_text(
        '{"step": "x", "metrics": [], "total_steps": {}}'
    )
    (spoilt / "checkpoints" / "step-x").mkdir()
    (run.path.parent / "notes" / "deep").mkdir(parents=True)
    (run.path.parent / "file.txt").write_text("mine")


def test_broken_and_foreign_folders_are_told_apart_and_never_crash(compose) -> None:
    run = compose.run()
    broken_folders(run)
    states = {facts.run.id: facts.state for facts in list_runs(Path("runs"))}
    assert states.pop(run.id) == states.pop("spoilt") == "unfinished"
    assert states.pop("alias") == "unfinished"  # an anchor read once is no harm
    assert set(states.values()) == {"broken"}
    assert set(states) == {"binary", "list", "deep", "no"}
    assert runs_command().returncode == 0


def test_order_and_name(compose) -> None:
    for name, loss, padding in (("a", 2.0, 10), ("b", 1.0, 10**6), ("c", 3.0, 10**5)):
        run = compose.run(f"name={name}", "trainer.max_steps=1")
        finish(run, 1, **{"val/loss": loss})
        (run.path / "padding").write_bytes(b"x" * padding)
    compose.run("name=d")
    for sort, names in (("metric", "bacd"), ("disk", "bca"), ("time", "dcba")):
        listed = [facts.run.name for facts in list_runs(Path("runs"), sort=sort)]
        assert "".join(listed)[: len(names)] == names
    assert [facts.run.name for facts in list_runs(Path("runs"), name="c")] == ["c"]


def test_delete_shows_first_and_deletes_on_yes(compose) -> None:
    run, other = compose.run(), compose.run("name=other")
    shown = runs_command(f"delete=default/{run.id}")
    assert (shown.returncode, run.path.exists()) == (0, True)
    assert f"default/{run.id}  unfinished" in shown.stdout
    assert "nothing was deleted; add yes=true to delete it" in shown.stdout
    for doomed, word in ((run, run.path), (other, f"other/{other.id}")):
        done = runs_command(f"delete={word}", "yes=true")
        assert done.returncode == 0, done.stderr
        assert f"deleted {doomed.path}, " in done.stdout
    assert list(Path("runs").iterdir()) == []


def test_what_is_no_run_below_the_runs_folder_is_never_deleted(compose, tmp_path) -> None:
    run = compose.run()
    outside = tmp_path / "outside"
    shutil.copytree(run.path, outside / "x" / "id")
    Path("runs/link").symlink_to(outside / "x")
    Path("runs/default/link").symlink_to(outside / "x" / "id")
    (Path("runs/default") / "notes").mkdir()
    words = ["link/id", "default/link", "default/notes", "default", ".", "..", "/", str(outside / "x" / "id"), ""]
    for word in [*words, "../outside/x/id", f"default/{run.id}/checkpoints", f"default/{run.id}x"]:
        with pytest.raises(UsageError, match="no run below"):
            find_doomed(word, Path("runs"))
    assert [facts.run.id for facts in list_runs(Path("runs"))] == [run.id]
    refused = runs_command("delete=default/nope", "yes=true")
    assert (refused.returncode, run.path.exists()) == (2, True)


def test_links_inside_a_run_are_removed_and_not_followed(compose, tmp_path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "weights").write_bytes(b"x" * 10**6)
    run = compose.run()
    (run.path / "link").symlink_to(kept)
    assert only().disk < 10**6
    doomed = find_doomed(only().label, Path("runs"))
    remove_run(doomed.run, Path("runs"))
    assert (kept / "weights").exists()
    assert not run.path.exists()


def test_a_kill_while_deleting_leaves_no_half_run(compose, monkeypatch, tmp_path) -> None:
    run, other = compose.run(), compose.run()

    def killed(path: Path, **options: object) -> None:
        assert not (path.parent / run.id).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("lmforge.runs.removal.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_run(RunFolder(run.path), Path("runs"))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert [found.id for found in all_runs(Path("runs"))] == [other.id]
    assert find_run("latest", Path("runs")).id == other.id
    remove_run(RunFolder(other.path), Path("runs"))  # the next deletion finishes the former
    assert list(Path("runs").iterdir()) == []


def test_200_runs_in_less_than_a_second_without_torch(compose) -> None:
    run = compose.run()
    finish(run, 7)
    checkpoint(run, 7, 7, **{"val/loss": 2.0})
    for number in range(199):
        shutil.copytree(run.path, run.path.parent / f"copy-{number}")
    probe = "import sys; from lmforge.cli import main; sys.argv = ['lmforge', 'runs']\ntry: main()\nfinally: print(sys.modules.keys() & {'torch', 'lightning', 'numpy'})"  # noqa: E501
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.rstrip().endswith("set()"), done.stderr
    assert done.stdout.count("unfinished") + done.stdout.count("finished (") == 200
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_run_of_a_sweep_goes_by_its_whole_path_and_takes_its_empty_folders_along(compose, monkeypatch) -> None:
    run, nested = compose.run(), Path("runs/default/sweep/0")
    shutil.copytree(run.path, nested)
    monkeypatch.setattr("lmforge.runs.facts.all_runs", lambda runs: [run, RunFolder(nested)])
    assert {facts.label for facts in list_runs(Path("runs"), name="default")} == {
        f"default/{run.id}",
        "default/sweep/0",
    }
    remove_run(find_doomed("default/sweep/0", Path("runs")).run, Path("runs"))
    assert [path.name for path in Path("runs/default").iterdir()] == [run.id]


def test_words_for_sizes_and_times() -> None:
    assert [size(n) for n in (0, 999, 1500, 123456, 2.5e9, 7e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "123 kB",
        "2.5 GB",
        "7.0 TB",
    ]
    assert [ago(0.0, now) for now in (5, 60, 7200, 200000)] == ["just now", "1 min ago", "2 h ago", "2 d ago"]


def test_a_folder_that_goes_away_meanwhile(compose) -> None:
    run = compose.run()
    shutil.rmtree(run.path)
    assert disk_bytes(run.path) == 0
    assert read_run(run, Path("runs")).state == "broken"
