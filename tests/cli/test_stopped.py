"""A run that is asked to stop saves, says how to go on, and ends with the code of the signal; so do its ranks."""

import os
import signal

import pytest
from changes import SLOW_STEPS

from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows


def logged(program) -> int:
    return len(read_rows(program.run() / "metrics.csv")) if program.runs() else 0


@pytest.mark.parametrize(
    ("number", "code", "devices"),
    [
        (signal.SIGTERM, 143, 1),
        (signal.SIGUSR1, 85, 1),
        (signal.SIGTERM, 143, 2),
        pytest.param(signal.SIGUSR1, 85, 2, marks=pytest.mark.slow),
    ],
)
def test_signals(program, number, code, devices) -> None:
    words = ("trainer.max_steps=40", f"trainer.devices={devices}", "callbacks.checkpoint.every_n_steps=1000")
    running = program.start(*words, changes=(SLOW_STEPS,))
    running.wait_for(lambda: logged(program) >= 3)
    running.send(number)
    outcome = running.finish(30)
    assert outcome.code == code, outcome.output
    assert running.left_behind() == []
    run = program.run()
    resume = f"python train.py resume={run.relative_to(program.folder)}"
    assert f"stopped at step {logged(program)} and saved; go on with: {resume}" in outcome.output
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{logged(program):08d}"
    assert not (run / "summary.json").exists()
    again = program.train(*words, "resume=auto")
    assert again.code == 0, again.output
    assert [int(row["step"]) for row in read_rows(program.run() / "metrics.csv")] == list(range(1, 41))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_not_finite(program, devices) -> None:
    running = program.start("optimizer.lr=1e30", f"trainer.devices={devices}", "trainer.nonfinite_patience=3")
    outcome = running.finish(60)
    assert outcome.code == 3, outcome.output
    assert "NonFinite: loss or gradient was not finite in 3 updates in a row" in outcome.output
    assert running.left_behind() == []


@pytest.mark.slow
def test_a_child_that_gets_the_signal(program) -> None:
    """SIGTERM to the second rank alone: all stop at one step and the first answers with the code."""
    running = program.start("strategy=ddp", "trainer.devices=2", "trainer.max_steps=10000", changes=(SLOW_STEPS,))
    running.wait_for(lambda: logged(program) >= 3)
    for child in running.children():
        os.kill(child, signal.SIGTERM)
    outcome = running.finish(30)
    assert outcome.code == 143, outcome.output
    assert running.left_behind() == []
