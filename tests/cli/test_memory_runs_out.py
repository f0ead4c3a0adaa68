"""Memory that really runs out: its exit code, what is said, and that the run then goes on with less at a time."""

import os
import re
import resource
import signal

import pytest
from changes import SLOW_STEPS

from lmforge.runs.folder import list_checkpoints
from lmforge.training.csvlog import read_rows

WORDS = ["model.vocab_size=16384", "model.d_model=16", "batch.sequences=128", "precision=32-true", "schedule=constant"]
WORDS += ["trainer.val_every_n_steps=null", "callbacks.samples=null"]
ROOM = 680 << 20  # bytes: enough for the small micro-batch and threads, less than the large one's logits and gradient


def little_memory() -> None:
    """As on a machine that has only so much more than this process holds already."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))


def losses(run) -> list[float]:
    return [float(row["train/loss"]) for row in read_rows(run / "metrics.csv")]


def test_the_allocator_fails_and_the_run_goes_on_with_a_smaller_micro_batch(program) -> None:
    small = (*WORDS, "batch.micro_sequences=8")
    whole = program.train(*small, "name=whole", "trainer.max_steps=4")
    assert whole.code == 0, whole.output
    assert program.start(*small, "trainer.max_steps=2", changes=(little_memory,)).finish().code == 0
    more = ("trainer.max_steps=4", "resume=auto")
    outcome = program.start(*WORDS, "batch.micro_sequences=128", *more, changes=(little_memory,)).finish()
    assert outcome.code == 4, outcome.output
    assert "Traceback" not in outcome.output
    said = "the process ran out of memory in training: step 3, micro-batch 1 of 1 (128 sequences of 32 tokens)"
    assert f"OutOfMemory: {said}" in outcome.output
    assert re.search(r"weights 2\.\d MB, gradients 0 B, optimizer 4\.\d MB, activations and all else", outcome.output)
    run = program.run()
    assert "the run goes on from step-00000002 with one of these words" in outcome.output
    assert f"python train.py resume={run.relative_to(program.folder)} ..." in outcome.output
    assert "    batch.micro_sequences=64 " in outcome.output
    assert (run / "exit_code").read_text() == "4\n"
    again = program.start(*small, *more, changes=(little_memory,)).finish()
    assert again.code == 0, again.output
    assert losses(run) == pytest.approx(losses(program.run("whole")), rel=1e-5)  # the same batches


def logged(program) -> int:
    return len(read_rows(program.run() / "metrics.csv")) if program.runs() else 0


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGKILL, 4, "was killed by SIGKILL after step"),
        pytest.param(signal.SIGSEGV, 1, "was killed by SIGSEGV after step", marks=pytest.mark.slow),
    ],
)
def test_a_second_process_that_is_killed(program, number, code, said) -> None:
    words = ("strategy=ddp", "trainer.devices=2", "trainer.max_steps=1000", "callbacks.checkpoint.every_n_steps=2")
    running = program.start(*words, changes=(SLOW_STEPS,))
    running.wait_for(lambda: logged(program) >= 3)
    (child,) = running.children()
    os.kill(child, number)
    outcome = running.finish(30)
    assert outcome.code == code, outcome.output
    assert f"rank 1 (process {child}) {said}" in outcome.output
    assert ("most likely the kernel did it because memory ran out" in outcome.output) == (code == 4)
    assert ("batch.micro_sequences=2 " in outcome.output) == (code == 4)
    assert "Traceback" not in outcome.output
    assert running.left_behind() == []
    assert list_checkpoints(program.run() / "checkpoints")


@pytest.mark.slow
def test_a_first_process_that_is_killed_is_named_by_the_second(program) -> None:
    running = program.start("strategy=ddp", "trainer.devices=2", "trainer.max_steps=1000", changes=(SLOW_STEPS,))
    running.wait_for(lambda: logged(program) >= 3)
    running.send(signal.SIGKILL)
    running.process.join()
    assert running.left_behind(20) == []
    gone = "(was killed by SIGKILL|is gone without a word)"  # whoever asked first for its exit code
    assert re.search(rf"rank 0 \(process {running.process.pid}\) {gone} after step \d+: most likely", running.output)
