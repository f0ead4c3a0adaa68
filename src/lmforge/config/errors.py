"""What can go wrong, and the exit code each kind ends with. The one table of exit codes."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from enum import IntEnum

HINT = "--help lists groups and words)"  # ends a printed list of problems


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


class SaveFailed(ExitError):
    """A checkpoint could not be written, for want of room or of the right to; those before it stand."""


class Requeue(ExitError):
    """The run was preempted after a save and wants to be started again."""

    exit_code = Exit.REQUEUE


class Terminated(ExitError):
    """SIGTERM stopped the run after a save."""

    exit_code = Exit.SIGTERM


class NotConnected(ExitError):
    """The ranks of a run did not find each other."""


class RankLost(ExitError):
    """Another rank of the run has died; ends with its exit code where that is one of this table."""

    def __init__(self, message: str, exit_code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# What it is called when memory runs out: by torch's allocators, the C++ and C libraries, threads, loader workers.
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "out of memory",
    "can't start new thread",
    "is killed by signal: Killed",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that memory ran out; torch's are recognised without importing torch."""
    if error is None:
        return False
    if isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError":
        return True
    told = isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in NO_MEMORY)
    return told or is_out_of_memory(error.__cause__)


def is_refused_by_disk(error: BaseException) -> bool:
    """Whether the disk is full or may not be written, which no line of code can mend."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def exit_code_of(error: BaseException) -> Exit:
    """The exit code an escaped exception stands for."""
    if isinstance(error, ExitError):
        return error.exit_code
    return Exit.OUT_OF_MEMORY if is_out_of_memory(error) else Exit.FAILED
