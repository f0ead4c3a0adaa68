"""What this package logs, as plain lines on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


class _Lines(logging.Handler):
    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self.say(f"{level}{self.format(record)}", file=sys.stderr, flush=True)


def show_log(say: Callable[..., None] = print) -> None:
    """Shows the package's log from now on; `say` is print, or print on rank 0 alone. Again changes nothing."""
    log = logging.getLogger("lmforge")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, _Lines) for handler in log.handlers):
        log.addHandler(_Lines(say))
