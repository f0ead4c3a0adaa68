"""Processes that are stopped: code 5 from the one that faces the shell, nothing left behind, and a run that goes on."""

import os
import re
import signal
import sys

import pytest
from changes import SLOW_STEPS
from test_launchers import execute, typed

from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows
from lmforge.training import stall

WATCH = ("callbacks.stall.step_seconds=2", "callbacks.stall.first_seconds=60", "callbacks.checkpoint.every_n_steps=2")


def short_grace() -> None:
    stall.GRACE = 4.0


def logged(program) -> int:
    return len(read_rows(program.run() / "metrics.csv")) if program.runs() else 0


@pytest.mark.parametrize(
    ("words", "lags"),
    [
        (("strategy=ddp", "trainer.devices=2"), r"rank 1 lags: no answer\n  rank 0 waits: "),
        pytest.param(
            ("data.num_workers=1",),
            r"rank 0 lags \(process \d+ on .+\): waiting for the data of step \d+, ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a rank", "a loader's worker"],
)
def test_a_stopped_child(program, words, lags) -> None:
    words = (*WATCH, *words)
    running = program.start(*words, "trainer.max_steps=100000", changes=(SLOW_STEPS, short_grace))
    running.wait_for(lambda: logged(program) >= 3)
    for child in running.children():
        os.kill(child, signal.SIGSTOP)
    outcome = running.finish(40)
    assert outcome.code == 5, outcome.output
    assert re.search(rf"\nStall: no progress for \d s after step \d+\n  {lags}", outcome.output)
    assert "Traceback" not in outcome.output
    assert running.left_behind(5) == []
    run = program.run()
    assert (run / "exit_code").read_text() == "5\n"
    assert "failed, no progress" in program("lmforge runs").output
    saved = list_checkpoints(run / "checkpoints")[-1].name
    one = ("strategy=single", "trainer.devices=1", "data.num_workers=0")
    again = program.train(*WATCH, *one, f"resume={run}", f"trainer.max_steps={int(saved[5:]) + 2}")
    assert again.code == 0, again.output
    assert f"resuming    {saved} of " in again.output


STOPPING = """\
import os, runpy, signal, sys
from lmforge.tasks.update import UpdateTask
from lmforge.training import stall

def stopped(task, step, seed=UpdateTask._seed):
    seed(task, step)
    if task.global_rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGSTOP)

UpdateTask._seed, stall.GRACE, sys.argv = stopped, 4.0, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_stopped_rank_under_torchrun(program) -> None:
    """torchrun answers 1 for every failure and kills the stopped one; the code is in the run folder."""
    environment = {**os.environ, "LMFORGE_CACHE": str(program.cache), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = program.folder / "stopping.py"
    script.write_text(STOPPING)
    words = [*launcher, str(script), *typed(program, "strategy=ddp", *WATCH)]
    outcome = execute(words, program.folder, environment, 150)
    assert outcome.code == 1, outcome.output
    assert re.search(r"Stall: no progress for \d s after step 4\n  rank 1 lags: no answer\n", outcome.output)
    assert (program.run() / "exit_code").read_text() == "5\n"
    saved = [path.name for path in list_checkpoints(program.run() / "checkpoints")]
    assert saved[-1] in ("step-00000002", "step-00000004")  # of which the stopped rank may not have written its part
