"""The whole way in, in processes of their own: exit codes, time, and that torch stays out."""

import json
import os
import subprocess
import sys

import pytest
import yaml

LIGHT = 1.5  # CPU seconds for help and completion
QUICK = 2.0  # seconds for an error


def test_defaults_run(door, tmp_path):
    result = door("train.py")
    assert result.code == 0, result.err
    (job,) = result.jobs
    assert job["heavy"] == []
    (folder,) = (tmp_path / "runs" / "default").iterdir()
    assert job["cfg"] == yaml.safe_load((folder / "config.yaml").read_text())


def test_wrong_words_are_told_at_once(door):
    result = door("train.py", "strategy=fspd", "optimizer.lr=fast", "trainer.max_stesp=3", "batch.sequences=15",
                  "trainer.devices=2", "modle=nano")  # fmt: skip
    assert result.code == 2
    assert result.wall < QUICK
    assert "Traceback" not in result.err
    assert result.err.startswith("python train.py: 5 problems\n")
    for said in ("did you mean fsdp?", "a number above 0", "did you mean trainer.max_steps?", "global batch 15"):
        assert said in result.err
    assert "did you mean model?" in result.err
    assert result.jobs == []


def test_unknown_experiment_lists_the_known(door):
    result = door("train.py", "experiment=does_not_exist")
    assert result.code == 2
    assert "choices: gpt2-124m, gpt2-355m, nano" in result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "experiment = gpt2-124m | gpt2-355m | nano"),
        (["--cfg", "job", "strategy=fsdp"], "context: ${model.context}"),
        (["--cfg", "job", "--resolve", "model.context=64"], "\n  context: 64"),
        (["--info", "defaults-tree"], "strategy: auto"),
        (["-sc", "install=bash"], "hydra_bash_completion"),
    ],
)
def test_questions_are_cheap_and_leave_nothing(door, tmp_path, words, said):
    bare = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    script = door.write("train.py")
    probe = (
        "import runpy, sys\n"
        f"sys.argv = {[str(script), *words]!r}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('HEAVY', [m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=bare, timeout=60)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "HEAVY []" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_help_time(door):
    assert door("train.py", "--help").cpu < LIGHT


@pytest.mark.parametrize(
    ("typed", "offered"), [("strategy=", "strategy=fsdp"), ("trainer.max", "trainer.max_steps="), ("seed", "seed=")]
)
def test_completion(door, typed, offered):
    line = f"python train.py {typed}"
    env = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "COMP_KEY": "9", "COMP_CWORD": "2"}
    result = door("train.py", "-sc", "query=bash", env=env)
    assert result.code == 0, result.err
    assert offered in result.out.split()
    assert "strategy=_connect" not in result.out.split()
    assert result.cpu < LIGHT


@pytest.mark.parametrize(
    ("error", "code"), [("RuntimeError", 1), ("UsageError", 2), ("NonFinite", 3), ("OutOfMemory", 4),
                        ("Requeue", 85), ("Terminated", 143)]
)  # fmt: skip
def test_exit_codes(door, error, code):
    result = door("train.py", env={"TEST_RAISE": error})
    assert result.code == code
    assert ("Traceback" in result.err) is (code == 1)
    assert "told to fail" in result.err


def test_child_rank_takes_the_folders_config(door, compose):
    run = compose.run("optimizer.lr=0.5")
    env = {"LMFORGE_RUN": str(run.path), "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    result = door("train.py", "optimizer.lr=0.1", "resume=auto", env=env)
    assert result.code == 0, result.err
    assert result.jobs[0]["cfg"]["optimizer"]["lr"] == 0.5
    assert door("train.py", env={**env, "TEST_RAISE": "Requeue"}).code == 0


def test_typed_words_beside_a_frozen_run_are_refused(door, compose):
    run = compose.run()
    assert "unset it" in door("train.py", "seed=1", env={"LMFORGE_RUN": str(run.path)}).err


def test_leftover_ranks_are_ignored_with_a_word(door):
    result = door("train.py", env={"RANK": "3", "WORLD_SIZE": "8"})
    assert result.code == 0
    assert result.err.count("ignored RANK=3 WORLD_SIZE=8") == 1


def test_same_run_cannot_be_written_twice(door, compose):
    run = compose.run()
    run.lock()
    try:
        result = door("train.py", f"resume={run.path}")
    finally:
        run.unlock()
    assert result.code == 2
    assert f"pid {os.getpid()}" in result.err


def test_resume_says_what_changed_and_records_it(door, compose):
    run = compose.run("optimizer.lr=1e-3")
    result = door("train.py", f"resume={run.path}", "optimizer.lr=3e-4")
    assert "optimizer.lr 0.001 -> 0.0003" in result.out
    assert result.jobs[0]["run"] == str(run.path)
    assert yaml.safe_load((run.path / "overrides.yaml").read_text())[1]["changed"] == {
        "optimizer.lr": {"from": 0.001, "to": 0.0003}
    }


def test_finished_run_ends_with_a_word(door, compose):
    run = compose.run()
    run.summary_file.write_text(json.dumps({"steps": 10**6, "reason": "max_steps"}))
    result = door("train.py", "resume=auto")
    assert (result.code, result.jobs) == (0, [])
    assert "is finished; a larger trainer.max_steps goes on" in result.out


INTERRUPT = """
import sys
from lmforge.start.entry import run_front_door

def job(cfg, run):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1) if cfg.seed else None
        raise

run_front_door("train", job)
"""


@pytest.mark.parametrize("seed", [0, 1], ids=["escapes", "ended-by-a-library"])
def test_ctrl_c_is_130(tmp_path, seed):
    script = tmp_path / "train.py"
    script.write_text(INTERRUPT)
    done = subprocess.run([sys.executable, script, f"seed={seed}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted by Ctrl-C\n")


def test_a_librarys_own_exit_code_stays(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(INTERRUPT.replace("raise KeyboardInterrupt", "sys.exit(7)"))
    assert subprocess.run([sys.executable, script], capture_output=True, timeout=60).returncode == 7


def test_a_rank_with_a_problem_of_its_own_says_which_it_is(door, compose):
    run = compose.run()
    env = {"LMFORGE_RUN": str(run.path), "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    result = door("train.py", env={**env, "TEST_RAISE": "UsageError"})
    assert result.code == 2
    assert result.err.startswith("rank 1: python train.py: 1 problem\n  told to fail")
    run.config_file.unlink()
    assert door("train.py", env=env).err == ""


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        (
            "evaluate.py",
            ["compile=inductor"],
            "compile=inductor: compile is chosen for training and is no group of configs",
        ),
        ("evaluate.py", ["trainer=default"], "type its keys: trainer.accelerator, trainer.devices"),
        ("evaluate.py", ["--cfg", "job", "optimizer=muon"], "groups here: paths, strategy, precision"),
        ("generate.py", ["model=nano"], "model is chosen for training"),
    ],
)
def test_groups_of_training_elsewhere(door, compose, script, words, said):
    run = compose.run()
    (run.checkpoints / "step-00000001").mkdir()
    result = door(script, *words)
    assert (result.code, result.jobs) == (2, [])
    assert said in result.err
    assert "+" not in result.err


def test_stranger_cannot_execute_anything(door, compose, tmp_path):
    run = compose.run()
    (run.checkpoints / "step-00000001").mkdir()
    text = run.config_file.read_text().replace("lmforge.models.gpt.GPT", "os.system")
    run.config_file.write_text(text.replace("  vocab_size: null", "  command: touch marker\n  vocab_size: null"))
    for script, word in (
        ("evaluate.py", "run=latest"),
        ("generate.py", "run=latest"),
        ("train.py", f"resume={run.path}"),
    ):
        result = door(script, word)
        assert result.code == 2
        assert "model._target_=os.system: not an allowed class" in result.err
        assert result.jobs == []
    assert not (tmp_path / "marker").exists()


def test_missing_run(door):
    result = door("evaluate.py", "run=nowhere")
    assert result.code == 2
    assert result.wall < QUICK


SHARED = """
import sys, types, json, time
from pathlib import Path
control = types.ModuleType("lmforge.parallel.control")
box = Path("shared.json")
def share_object(value):
    if value is not None:
        box.write_text(json.dumps(value))
    while not box.is_file() or not box.read_text():
        time.sleep(0.02)
    return json.loads(box.read_text())
control.share_object = share_object
sys.modules["lmforge.parallel.control"] = control
connect = types.ModuleType("lmforge.parallel.connect")
connect.connect_launched = lambda cfg, launch: None
sys.modules["lmforge.parallel.connect"] = connect
"""


def torchrun(door, *words):
    """Two ranks as torchrun starts them, telling each other through a file."""
    script = door.write("train.py", SHARED)
    ranks = []
    for rank in "01":
        env = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2",
               "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
        command = [sys.executable, str(script), *words]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=30) for rank in ranks]
    return [rank.returncode for rank in ranks], said


def test_torchrun_ranks_share_one_folder(door, tmp_path):
    codes, said = torchrun(door)
    assert codes == [0, 0], said
    jobs = [json.loads(out.splitlines()[-1][4:]) for out, _ in said]
    assert jobs[0]["run"] == jobs[1]["run"]
    assert jobs[0]["cfg"] == jobs[1]["cfg"]
    assert jobs[0]["cfg"]["trainer"]["devices"] == 2
    assert len(list((tmp_path / "runs" / "default").iterdir())) == 1


@pytest.mark.parametrize("word", ["optimizer.lr=fast", "weights=nowhere", "batch.tokens=768"])
def test_torchrun_ranks_fail_together_and_one_speaks(door, word):
    codes, said = torchrun(door, word)
    assert codes == [2, 2]
    assert word in said[0][1]
    assert said[0][1].count("1 problem\n") == 1
    assert said[1][1] == ""
