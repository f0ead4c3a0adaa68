"""Rows of the table: what was measured, what it had to reach, and the verdict."""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EQUAL = (0.97, 1.03)  # a contender against itself; outside, the row is too noisy to trust

PASS, FAIL, NOISY, WARN, SHOWN, NOT_RUN, BROKEN = "PASS", "FAIL", "NOISY", "warn", "shown", "not run", "broken"


@dataclass(frozen=True)
class Row:
    """One line of the table. `facts` are the numbers behind it, for the JSON."""

    what: str
    goal: str
    measured: str
    verdict: str
    facts: dict[str, Any] = field(default_factory=dict)


def verdict(reached: bool, again: float | None = None) -> str:
    """PASS or FAIL; NOISY when a contender against itself (`again`, a ratio) was not equal."""
    if again is not None and not EQUAL[0] <= again <= EQUAL[1]:
        return f"{NOISY} ({PASS if reached else FAIL})"
    return PASS if reached else FAIL


def not_run(what: str, goal: str, why: str) -> Row:
    return Row(what, goal, why, NOT_RUN)


def lines(rows: Iterable[Row], width: int = 44) -> list[str]:
    """The table as text: long cells are wrapped, one blank line after a row that took several."""
    cells = [("what", "goal", "measured", "")] + [(r.what, r.goal, r.measured, r.verdict) for r in rows]
    return [line.rstrip() for cell in cells for line in _row(cell, (30, 22, width, 14))]


def _row(cells: tuple[str, ...], widths: tuple[int, ...]) -> list[str]:
    columns = [
        [part for line in cell.split("\n") for part in textwrap.wrap(line, width) or [""]]
        for cell, width in zip(cells, widths, strict=True)
    ]
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    table = [
        "  ".join(text.ljust(w) for text, w in zip(parts, widths, strict=True)) for parts in zip(*padded, strict=True)
    ]
    return [*table, ""] if height > 1 else table


def write(path: Path, machine: dict[str, Any], rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
