"""What a run is compared with: the samples of every update, and the digits it ended with."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows


@dataclass(frozen=True)
class Difference:
    """Samples of some updates that one run saw and the other did not."""

    lost: int
    repeated: int


def samples(run: Path) -> dict[int, Counter[str]]:
    """step -> its rows by hash, over all ranks. Of an update that was done again after a fault the last time counts:
    what it did before was undone by going back to a checkpoint."""
    found: dict[int, Counter[str]] = {}
    for file in run.glob("probe/rank-*.txt"):
        lines = [line.split(" ") for line in file.read_text().splitlines() if line]
        last = {int(step): rows for step, *rows in lines}
        for step, rows in last.items():
            found.setdefault(step, Counter()).update(rows)
    return found


def compare(ours: dict[int, Counter[str]], theirs: dict[int, Counter[str]], steps: range) -> Difference:
    """Ours against the reference, over all rows of `steps` together."""
    mine, whole = Counter[str](), Counter[str]()
    for step in steps:
        mine += ours.get(step, Counter())
        whole += theirs.get(step, Counter())
    return Difference((whole - mine).total(), (mine - whole).total())


def digits(run: Path) -> dict[str, object]:
    """All that must be equal to the last digit: the log without its speeds, and the hash of every file of the last
    checkpoint."""
    rows = read_rows(run / "metrics.csv")
    log = [{name: value for name, value in row.items() if value and not name.startswith("speed/")} for row in rows]
    newest = list_checkpoints(run / "checkpoints")[-1:]
    states = [json.loads((path / "state.json").read_text(encoding="utf-8")) for path in newest]
    return {"log": log, "files": {f["file"]: f["sha256"] for state in states for f in state["files"]}}


def left_files(run: Path) -> list[str]:
    """What an interrupted write left behind and nobody removed."""
    hidden = [*run.glob("checkpoints/.*"), *run.glob(".*.tmp"), *run.glob("*/.*.tmp")]
    return sorted(str(path.relative_to(run)) for path in hidden)
