"""`lmforge launch COMMAND`: a launcher with the settings it needs, and the exit code of the run that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmforge.config.errors import Exit
from lmforge.config.launch import OUTCOME_VARIABLE

ABOUT = "Runs torchrun and ends with the run's own exit code."
USAGE = f"""\
Usage: lmforge launch COMMAND ...

{ABOUT}

  lmforge launch torchrun --standalone --nproc-per-node=8 --max-restarts=3 train.py resume=auto

torchrun answers 1 for every failure and 0 for a run that was preempted; this command ends with 85, 143, 4 ... as the
run does. SIGTERM and SIGUSR1 are handed on to it."""
# Where torchrun's own defaults are in the way of a run that goes on; what is in the environment already stays.
SETTINGS = {
    # Agents share a store that one which joins later never hears of, so that a job could not grow (seen in torch 2.13).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # SIGUSR1 would end the agent itself: it has to reach the ranks.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
HANDED_ON = {signal.SIGTERM: Exit.SIGTERM, signal.SIGUSR1: Exit.REQUEUE}  # and what a run that hears them ends with


def launch(command: Sequence[str]) -> int:
    """Run a command to its end; its run's exit code where that is known and no success, else its own.

    A command that was told to end, and did not do so well, ends with the code of that: the signal may have come between
    two starts of the ranks, when none of them could hear it.
    """
    if not command or command[0] in ("-h", "--help"):
        print(USAGE)
        return int(Exit.DONE if command else Exit.WRONG_INPUT)
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "exit_code"
        environment = {**SETTINGS, **os.environ, OUTCOME_VARIABLE: str(outcome)}
        try:
            with _handing_on() as (children, told):
                children.append(subprocess.Popen(command, env=environment))
                if told:  # before there was anyone to hand it on to
                    children[0].terminate()
                code = children[0].wait()
        except OSError as error:
            print(f"lmforge launch: {command[0]}: {error.strerror}", file=sys.stderr)
            return int(Exit.WRONG_INPUT)
        code = _noted(outcome) or (128 - code if code < 0 else code)
        return int(told[0]) if told and code and code not in told else code


@contextmanager
def _handing_on() -> Iterator[tuple[list[subprocess.Popen[bytes]], list[Exit]]]:
    """Signals for this process reach those in the first list, and what they mean is added to the second. Ctrl-C reaches
    them by itself, and only must not end this one."""
    children: list[subprocess.Popen[bytes]] = []
    told: list[Exit] = []

    def hand_on(number: int, frame: object) -> None:
        told.append(HANDED_ON[signal.Signals(number)])
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield children, told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _noted(outcome: Path) -> int:
    try:
        return int(outcome.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
