"""Loader workers under signals: those meant for the whole process group, as schedulers, terminals and `timeout` send
them, and one that asks a worker where it is."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})
PAPER = "lmforge-worker-stacks"  # a file in memory, which the parent reads through /proc
ANSWER_SECONDS = 0.5


def make_worker(worker: int) -> None:
    """What a new worker has to do first."""
    outlast_signals()
    if hasattr(os, "memfd_create"):
        faulthandler.register(signal.SIGUSR2, os.memfd_create(PAPER))


def ask_workers() -> dict[int, str]:
    """The Python stacks of this process's living loader workers by process number; empty text when one does not answer.
    They answer also while they hang in Python or in C, but not while they are stopped."""
    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    papers = {pid: paper for pid in children if (paper := _paper(pid))}
    for pid in papers:
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
    if papers:
        time.sleep(ANSWER_SECONDS)
    return {pid: _text(paper) for pid, paper in papers.items()}


def _paper(pid: int) -> Path | None:
    """None for a child that would die of the signal."""
    with suppress(OSError):
        return next((fd for fd in Path(f"/proc/{pid}/fd").iterdir() if PAPER in os.readlink(fd)), None)
    return None


def _text(paper: Path) -> str:
    try:
        return paper.read_text(errors="replace")
    except OSError:
        return ""


def outlast_signals() -> None:
    """Make this worker outlive a SIGTERM or SIGUSR1 of anybody but its parent, which still has to finish its step.

    The parent's own SIGTERM must end it: multiprocessing sends one at exit and then waits without limit, so ignoring
    the signal altogether could hang. Only a thread that waits for the signal learns who sent it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_for_parent, args=(os.getppid(),), name="signals", daemon=True).start()


def _end_for_parent(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)
