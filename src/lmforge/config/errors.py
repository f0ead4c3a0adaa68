"""What can go wrong, and the exit code each kind ends with. The one table of exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every LMForge process. Launchers restart on REQUEUE; WRONG_INPUT never deserves a retry;
    INTERRUPTED = interrupted by Ctrl-C."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    NON_FINITE = 3
    OUT_OF_MEMORY = 4
    STALL = 5
    REQUEUE = 85
    INTERRUPTED = 130
    SIGTERM = 143


class ExitError(Exception):
    """An error that knows the exit code of the process it ends; printed as a short message without a traceback."""

    exit_code: Exit = Exit.FAILED


class UsageError(ExitError):
    """Wrong input. Carries every problem found, so that one run of the command shows them all; none when another
    process says them."""

    exit_code = Exit.WRONG_INPUT

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NonFinite(ExitError):
    """Too many updates in a row had a loss or gradient that was not finite."""

    exit_code = Exit.NON_FINITE


class OutOfMemory(ExitError):
    """The device or the host ran out of memory."""

    exit_code = Exit.OUT_OF_MEMORY


class Stall(ExitError):
    """No progress was seen for longer than the watchdog allows."""

    exit_code = Exit.STALL


class Requeue(ExitError):
    """The run was preempted after a save and wants to be started again."""

    exit_code = Exit.REQUEUE


class Terminated(ExitError):
    """SIGTERM stopped the run after a save."""

    exit_code = Exit.SIGTERM


def exit_code_of(error: BaseException) -> Exit:
    """The exit code an escaped exception stands for; torch's out-of-memory is recognised without importing torch."""
    if isinstance(error, ExitError):
        return error.exit_code
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Exit.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return Exit.OUT_OF_MEMORY
    return Exit.FAILED
