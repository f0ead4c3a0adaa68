"""kill -9 at any moment: a resumed run ends with the digits of one that was never killed."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from changes import SLOW_STEPS, SLOW_WRITES

from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows
from lmforge.training.checkpoint import Checkpoint

WORDS = ("model.dropout=0.1", "optimizer=muon")


def digits(run: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The log without its speeds, and the sha256 of every file of the last checkpoint."""
    rows = read_rows(run / "metrics.csv")
    log = [{name: value for name, value in row.items() if not name.startswith("speed/")} for row in rows]
    files = Checkpoint(list_checkpoints(run / "checkpoints")[-1]).files
    return log, {name: entry["sha256"] for name, entry in files.items()}


def logged(run: Path) -> int:
    return len(read_rows(run / "metrics.csv"))


def test_in_the_middle_of_a_checkpoint(program) -> None:
    """Killed while a file of the second checkpoint is half written: the first is untouched, nothing else is read."""
    assert program.train(*WORDS, "name=whole").code == 0
    running = program.start(*WORDS, changes=(SLOW_WRITES, SLOW_STEPS))
    running.wait_for(lambda: list((program.folder / "runs/default").glob("*/checkpoints/.step-00000010.part/*")))
    running.kill()
    run = program.run()
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000005"]
    outcome = program.train(*WORDS, "resume=auto")
    assert outcome.code == 0, outcome.output
    assert "resuming    step-00000005 of 20 steps" in outcome.output
    assert ".step-00000010.part: a save that did not come to its end; removed" in outcome.output
    assert digits(program.run()) == digits(program.run("whole"))
    assert not list(run.glob("checkpoints/.*"))


def at_random(program, rounds: int, seconds: float, *words: str) -> None:
    """Kill the run `rounds` times after a random time of work, resuming each time; then let it end."""
    assert program.train(*WORDS, *words, "name=whole").code == 0
    moments = random.Random(5)
    steps = []
    for _ in range(rounds):
        running = program.start(*WORDS, *words, "resume=auto", changes=(SLOW_WRITES, SLOW_STEPS))
        running.wait_for(lambda: program.runs() and logged(program.run()) >= 1)
        time.sleep(moments.uniform(0.0, seconds))
        running.kill()
        steps.append(max([0, *(Checkpoint(path).step for path in list_checkpoints(program.run() / "checkpoints"))]))
    outcome = program.train(*WORDS, *words, "resume=auto")
    assert outcome.code == 0, outcome.output
    assert steps == sorted(steps)
    assert digits(program.run()) == digits(program.run("whole"))


def test_at_random_moments(program) -> None:
    at_random(program, 3, 1.2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_at_random_moments_on_two_processes(program, strategy) -> None:
    at_random(program, 4, 2.5, f"strategy={strategy}", "trainer.devices=2")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 3])
def test_the_second_process_does_not_outlive_the_first(program, steps) -> None:
    """Killed while it trains, or before the second has found it."""
    running = program.start("strategy=fsdp", "trainer.devices=2", "trainer.max_steps=100000")
    running.wait_for(lambda: running.children() and (not steps or logged(program.run()) >= steps))
    running.send(signal.SIGKILL)
    assert running.left_behind(30) == []


def test_a_broken_newest_checkpoint(program) -> None:
    """A resume falls back to the one before and names the broken one; named itself it is refused."""
    running = program.start("callbacks.checkpoint.keep_last=2", changes=(SLOW_STEPS,))
    running.wait_for(lambda: len(list(program.folder.glob("runs/default/*/checkpoints/step-*"))) >= 2)
    running.kill()
    for harm in ("half", "empty", "missing", "state", "bit"):
        run = program.folder / "runs" / "broken" / harm
        shutil.copytree(program.run(), run)
        newest = list_checkpoints(run / "checkpoints")[-1]
        spoil(newest, harm)
        refused = program(f"python evaluate.py run={run} ckpt={newest}")
        assert refused.code == 2
        assert f"incomplete or corrupt checkpoint {newest}" in refused.output
        outcome = program.train(f"resume={run}", "trainer.max_steps=11")
        assert outcome.code == 0, outcome.output
        assert f"warning: incomplete or corrupt checkpoint {newest}" in outcome.output
        assert f"resuming    step-{int(newest.name[5:]) - 5:08d}" in outcome.output


def spoil(checkpoint: Path, harm: str) -> None:
    weights, state = checkpoint / "weights-00000.safetensors", checkpoint / "state.json"
    content = bytearray(weights.read_bytes())
    if harm == "missing":
        weights.unlink()
    elif harm == "state":
        state.write_text(state.read_text()[:100])
    elif harm == "bit":
        content[-5] ^= 1
        weights.write_bytes(content)
    else:
        weights.write_bytes(content[: len(content) // 2 if harm == "half" else 0])
