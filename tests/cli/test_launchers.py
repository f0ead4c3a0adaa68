"""Real interpreters: an empty environment, torchrun, and two runs at once."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commands import ROOT, Outcome
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
def test_two_runs_started_at_once(program) -> None:
    """Always two folders, each with the seed of its own words."""
    for _ in range(3):
        both = [program.start(f"seed={seed}", "trainer.max_steps=1", "name=both") for seed in (1, 2)]
        assert [running.finish().code for running in both] == [0, 0]
    seeds = [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in program.runs("both")]
    assert sorted(seeds) == [1, 1, 1, 2, 2, 2]
