"""Real interpreters: an empty environment, torchrun, and two runs at once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from commands import ROOT, Outcome
from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows


def execute(words: list[str], folder: Path, environment: dict[str, str], seconds: float = 120.0) -> Outcome:
    """Run a command in a session of its own; kills all of it when it hangs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{' '.join(words)} did not end:\n{process.communicate()[0]}") from None
    return Outcome(process.returncode, output)


def typed(program, *words: str) -> list[str]:
    return [str(ROOT / "train.py"), *program.tiny(*words)[2:]]


def test_an_empty_environment(program) -> None:
    """Only PATH and HOME: the default config prints, resolved, without torch; a tiny run trains."""
    bare = {"PATH": os.environ["PATH"], "HOME": str(program.folder)}
    printed = execute([sys.executable, str(ROOT / "train.py"), "--cfg", "job", "--resolve"], program.folder, bare)
    assert printed.code == 0, printed.output
    assert yaml.safe_load(printed.output)["paths"]["cache"] == "./.cache"
    assert "${" not in printed.output
    trained = execute([sys.executable, *typed(program, "trainer.max_steps=2", "logger=csv")], program.folder, bare)
    assert trained.code == 0, trained.output


@pytest.mark.slow
def test_torchrun(program) -> None:
    """One folder, made by rank 0, which alone speaks; devices come from the launcher, whatever was typed."""
    environment = {**os.environ, "LMFORGE_CACHE": str(program.cache), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    outcome = execute([*launcher, *typed(program, "strategy=fsdp")], program.folder, environment)
    assert outcome.code == 0, outcome.output
    assert len(re.findall(r"^run folder", outcome.output, flags=re.MULTILINE)) == 2  # the head and the summary
    run = program.run()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["trainer"]["devices"], config["strategy"]["kind"]) == (2, "mesh")
    assert len(list(run.glob("checkpoints/step-00000020/weights-*"))) == 2
    assert [int(row["step"]) for row in read_rows(run / "metrics.csv")] == list(range(1, 21))
    wrong = execute([*launcher, *typed(program, "strategy=fsdp", "batch.sequences=3")], program.folder, environment)
    assert wrong.code != 0
    assert wrong.output.count("global batch 3") == 1
    assert len(program.runs()) == 1


@pytest.mark.slow
def test_a_launch_ends_with_the_code_of_its_run(program) -> None:
    """torchrun goes on by itself after a worker was killed; told to make room the whole ends with 85, which torchrun
    would hide."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command = [sys.executable, "-m", "lmforge.cli", "launch", *launcher, *typed(program, "trainer.max_steps=100000")]
    environment = {**os.environ, "LMFORGE_CACHE": str(program.cache), "OMP_NUM_THREADS": "1"}
    log = program.folder / "launch.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=program.folder, env=environment, stdout=out, stderr=out)
    try:
        wait_until(lambda: "step 15: " in log.read_text(), process)
        os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
        wait_until(lambda: re.search(r"^step \d", log.read_text().partition("resuming  ")[2], re.MULTILINE), process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 85, log.read_text()
    finally:
        for pid in (process.pid, *children(process.pid), *ranks_below(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    run = program.run()
    assert (run / "exit_code").read_text() == "85\n"
    steps = [int(row["step"]) for row in read_rows(run / "metrics.csv")]
    assert steps == list(range(1, len(steps) + 1))
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{len(steps):08d}"


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    return []


def ranks_below(pid: int) -> list[int]:
    """The workers of the agent that `pid` has started."""
    found = [child for agent in children(pid) for child in children(agent)]
    return [child for child in found if "train.py" in Path(f"/proc/{child}/cmdline").read_text()]


def wait_until(done: Callable[[], object], process: "subprocess.Popen[bytes]", seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_two_runs_started_at_once(program) -> None:
    """Always two folders, each with the seed of its own words."""
    for _ in range(3):
        both = [program.start(f"seed={seed}", "trainer.max_steps=1", "name=both") for seed in (1, 2)]
        assert [running.finish().code for running in both] == [0, 0]
    seeds = [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in program.runs("both")]
    assert sorted(seeds) == [1, 1, 1, 2, 2, 2]
