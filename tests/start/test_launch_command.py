"""`lmforge launch`: what a launcher makes of a run's end is undone, and signals reach it."""

import os
import signal
import subprocess
import sys

import pytest

from lmforge.config.launch import note_outcome
from lmforge.start.launch_command import SETTINGS, USAGE, launch

RANK = "import os, sys; from lmforge.config.launch import note_outcome; "


def command(code: int, *noted: int | None) -> list[str]:
    """A launcher that ends with `code` after a rank has noted how the run ended."""
    return [sys.executable, "-c", RANK + f"[note_outcome(c) for c in {noted}]; sys.exit({code})"]


@pytest.mark.parametrize(
    ("code", "noted", "out"),
    [
        (0, [85], 85),  # torchrun, whose ranks end with 0 after a preemption
        (0, [143], 143),
        (1, [4], 4),  # torchrun's answer to any failure
        (0, [0], 0),
        (1, [0], 1),  # the first rank was done, another one failed without a word
        (7, [], 7),
        (0, [1, None, 0], 0),  # failed, was started again, and was done
        (1, [85, None], 1),  # preempted, started again, and killed
    ],
)
def test_the_code_is_the_runs(code, noted, out) -> None:
    assert launch(command(code, *noted)) == out
    assert "LMFORGE_OUTCOME" not in os.environ


def test_a_killed_launcher_and_none() -> None:
    assert launch([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137
    assert launch(["no-such-launcher"]) == 2
    note_outcome(5)  # nobody asked


def test_settings_of_the_environment_stay(monkeypatch, tmp_path) -> None:
    name, other = SETTINGS
    monkeypatch.setenv(name, "own")
    said = tmp_path / "said"
    launch(
        [
            sys.executable,
            "-c",
            f"import os; open({str(said)!r}, 'w').write(os.environ[{name!r}] + os.environ[{other!r}])",
        ]
    )
    assert said.read_text() == "own" + SETTINGS[other]


WAITS = """
import signal, sys, time
from lmforge.config.launch import note_outcome

def end(number, frame):
    print(number, flush=True)
    [note_outcome(code) for code in {noted}]
    sys.exit({code})

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "code", "noted", "out"),
    [
        (signal.SIGUSR1, 0, [85], 85),
        (signal.SIGTERM, 1, [143], 143),
        (signal.SIGUSR1, 1, [4], 85),  # between two starts of the ranks: what the last one died of is not the end
        (signal.SIGTERM, 1, [], 143),
        (signal.SIGTERM, 0, [0], 0),  # it was just done
    ],
)
def test_signals_are_handed_on(number, code, noted, out) -> None:
    start = "import sys; from lmforge.cli import main; main()"
    line = [sys.executable, "-c", start, "launch", sys.executable, "-c", WAITS.format(code=code, noted=noted)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(20) == out
    assert process.stdout.read() == f"{int(number)}\n"
    process.stdout.close()


def test_help(capsys) -> None:
    assert (launch(["--help"]), launch([])) == (0, 2)
    assert capsys.readouterr().out == f"{USAGE}\n" * 2
