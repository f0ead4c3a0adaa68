"""A range of numbers that a search draws from, read from Hydra's words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.schema import Key


@dataclass(frozen=True)
class Space:
    """From `low` to `high`, both included. `step` None = any number between; `log` = evenly in the exponent;
    `whole` = whole numbers only."""

    low: float
    high: float
    step: float | None = None
    log: bool = False
    whole: bool = False

    @property
    def endless(self) -> bool:
        """An interval: its values cannot be listed."""
        return self.step is None


def read_space(sweep: Any, values: list[Any], known: Key | None) -> Space | None:
    """The space of `interval(low, high)` or of a rising `range(start, stop, step)`, whose `values` are listed already.
    None for a list of choices. Raises UsageError when its numbers or tags make none."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    tags = set(sweep.tags or ())
    if tags - {"log"}:
        raise UsageError(f"tag {', '.join(sorted(tags - {'log'}))} unknown; there is tag(log, interval(low, high))")
    if isinstance(sweep, IntervalSweep):
        space = _interval(sweep, known, "log" in tags)
    elif isinstance(sweep, RangeSweep) and len(values) > 1 and values[0] < values[-1]:
        whole = all(isinstance(value, int) for value in values)
        space = Space(values[0], values[-1], float(sweep.step), "log" in tags, whole)
    elif tags:
        raise UsageError("tag(log, ...) goes with interval(low, high)")
    else:
        return None
    _check(space)
    return space


def _interval(sweep: Any, known: Key | None, log: bool) -> Space:
    kind = known.kind if known else "float"
    fits = sweep.start == int(sweep.start) and sweep.end == int(sweep.end)
    whole = kind == "int" or (kind == "number" and fits and sweep.end > 1)  # up to 1 it is a share
    if whole and not fits:
        raise UsageError("the ends must be whole numbers")
    number = int if whole else float
    return Space(number(sweep.start), number(sweep.end), log=log, whole=whole)


def _check(space: Space) -> None:
    if space.low >= space.high:
        raise UsageError("the first number must be the smaller one")
    if space.log and space.low <= 0:
        raise UsageError("tag(log, ...) needs numbers above 0")
    if space.log and space.step not in (None, 1.0):
        raise UsageError("tag(log, ...) goes with interval(low, high), which has no step")
