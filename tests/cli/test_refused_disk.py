"""A disk that is full, or may not be written: one clear error, nothing lost, and the run goes on when it is mended."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from changes import SLOW_STEPS
from test_killed import digits

from lmforge.runs.folder import list_checkpoints


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs a right to mount: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    with (disk / "others").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.parametrize("harm", ["full", "read-only"])
def test_the_run_says_so_and_goes_on_when_it_is_mended(program, disk, harm) -> None:
    words = (f"paths.runs={disk}/runs", "callbacks.checkpoint.every_n_steps=4")
    assert program.train(f"paths.runs={program.folder}/whole", words[1]).code == 0
    running = program.start(*words, changes=(SLOW_STEPS,))
    running.wait_for(lambda: list(disk.glob("runs/default/*/checkpoints/step-00000004")))
    (run,) = disk.glob("runs/default/*")
    if harm == "full":
        fill(disk)
    else:
        mount("--bind", str(run / "checkpoints"), str(run / "checkpoints"))
        mount("-o", "remount,ro,bind", str(run / "checkpoints"))
    ended = running.finish()
    assert ended.code == 1, ended.output
    reason = "No space left on device" if harm == "full" else "Read-only file system"
    assert reason in ended.output
    assert "Traceback" not in ended.output
    assert f"python train.py resume={run}" in ended.output
    assert [path.name for path in list_checkpoints(run / "checkpoints")][-1] in ("step-00000004", "step-00000008")
    if harm == "full":
        (disk / "others").unlink()
    else:
        subprocess.run(["umount", run / "checkpoints"], check=True)
    again = program.train(*words, "resume=auto")
    assert again.code == 0, again.output
    (whole,) = (program.folder / "whole" / "default").iterdir()
    assert digits(run) == digits(whole)


def test_a_place_for_runs_that_may_not_be_written_is_wrong_input(program, disk) -> None:
    os.mkdir(disk / "runs")
    mount("-o", "remount,ro", str(disk))
    outcome = program.train(f"paths.runs={disk}/runs")
    assert outcome.code == 2, outcome.output
    assert "paths.runs" in outcome.output
    assert "Traceback" not in outcome.output
