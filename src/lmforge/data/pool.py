"""The same work on every part of a corpus, over processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from lmforge.config.errors import ExitError
from lmforge.config.launch import end_with_parent
from lmforge.config.machine import thread_share

_ALONE_BELOW = 32 << 20  # bytes of a corpus that one process does sooner than others have started


class Pool:
    """Runs functions in `workers` processes, or here when that is one."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._waiting: set[Future[Any]] = set()

    def start(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Begins a call, and returns the results that have come in meanwhile (of any earlier call, in any order)."""
        if self.workers == 1:
            return [function(*arguments)]
        if self._executor is None:
            self._executor = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"), initializer=_begin)
        self._waiting.add(self._executor.submit(function, *arguments))
        return self._collect(timeout=None if len(self._waiting) > 4 * self.workers else 0)

    def finish(self) -> Iterator[Any]:
        """The results still to come."""
        while self._waiting:
            yield from self._collect(timeout=None)

    def map(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The results of all calls, in any order."""
        for arguments in calls:
            yield from self.start(function, *arguments)
        yield from self.finish()

    def _collect(self, timeout: float | None) -> list[Any]:
        done, self._waiting = wait(self._waiting, timeout, FIRST_COMPLETED)
        try:
            return [future.result() for future in done]
        except BrokenProcessPool:
            raise ExitError(
                "a process that prepares data was killed (out of memory?); type the same words again: "
                "what is finished is used again, and workers=1 needs least memory"
            ) from None

    def close(self) -> None:
        """Ends the processes and waits for them; calls not begun are dropped."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def pool(workers: int | str, size: int) -> Iterator[Pool]:
    """Processes for a corpus of `size` bytes (0 = unknown): `auto` is one for a small corpus, else one a core."""
    if workers == "auto":
        workers = 1 if 0 < size < _ALONE_BELOW else thread_share(1)
    made = Pool(int(workers))
    try:
        yield made
    finally:
        made.close()


def _begin() -> None:
    """Ctrl-C reaches the whole group of processes: the parent alone answers it. Whatever ends the parent ends this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(grace=0.0)
