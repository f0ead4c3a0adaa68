"""How far a preparation is: a bar on a terminal, a plain line now and then elsewhere. Written to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LINE_SECONDS = 10.0
_BAR_SECONDS = 0.2


class Meter:
    """Shows one stage after the other; `total` and `done` are bytes."""

    def __init__(self, bar: Any = None) -> None:
        self._bar, self._task = bar, None
        self._stage, self._total = "", 0
        self._next = time.monotonic() + _LINE_SECONDS

    def stage(self, name: str, total: int) -> None:
        self._stage, self._total = name, total
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total or None)
            self._bar.refresh()

    def show(self, done: int) -> None:
        """Cheap enough for every document: something is drawn only when it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            self._bar.refresh()
            self._next = now + _BAR_SECONDS
        else:
            share = f" of {self._total / 1e6:.0f} MB ({done / self._total:.0%})" if self._total else " MB"
            print(f"{self._stage}: {done / 1e6:.0f}{share}", file=sys.stderr, flush=True)
            self._next = now + _LINE_SECONDS


@contextmanager
def meter() -> Iterator[Meter]:
    if not sys.stderr.isatty():
        yield Meter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False, transient=True
    ) as bar:
        shown = Meter(bar)
        shown._next = 0.0
        yield shown
