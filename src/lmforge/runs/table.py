"""`lmforge runs`: the list of all runs, and deleting some of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lmforge.runs.facts import RunFacts, ago, list_runs, size
from lmforge.runs.removal import find_doomed, remove_run

COLUMNS = ("run", "state", "steps", "metric", "disk", "active")
COLOURS = {"running": "bold cyan", "finished": "green", "failed": "red", "broken": "red"}


def runs_job(cfg: DictConfig) -> None:
    """Prints the runs below `paths.runs`; with `delete` shows what would go, and with `yes` removes it."""
    runs = Path(cfg.paths.runs)
    if cfg.delete is None:
        show(list_runs(runs, cfg.name, cfg.sort), runs, "" if cfg.name == "all" else f" of the name {cfg.name}")
        return
    doomed = find_doomed(cfg.delete, runs)
    show([doomed], runs)
    if not cfg.yes:
        print("nothing was deleted; add yes=true to delete it")
        return
    remove_run(doomed.run, runs)
    print(f"deleted {doomed.run.path}, {size(doomed.disk)} freed")


def show(found: Sequence[RunFacts], runs: Path, which: str = "") -> None:
    """A table in colours for a terminal, plain columns for a pipe."""
    if not found:
        print(f"no runs{which} below {runs}")
        return
    rows = [row(facts) for facts in found]
    total = f"{len(found)} run{'s'[: len(found) != 1]}, {size(sum(facts.disk for facts in found))} below {runs}"
    if sys.stdout.isatty():
        _coloured(rows, total)
    else:
        print(plain_table([COLUMNS, *rows]))
        print(total)


def row(facts: RunFacts) -> tuple[str, ...]:
    done = "-" if facts.steps is None else str(facts.steps)
    planned = "?" if facts.planned is None else str(facts.planned)
    metric = "-" if facts.metric is None else f"{facts.metric.removeprefix('val/')} {facts.value:.4f}"
    return facts.label, facts.state, f"{done} / {planned}", metric, size(facts.disk), ago(facts.active)


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows)
    return "\n".join(line.rstrip() for line in lines)


def _coloured(rows: Sequence[Sequence[str]], total: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(rich_table(rows))
    console.print(f"[dim]{total}[/]", soft_wrap=True)


def rich_table(rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("steps", "disk", "active") else "left", overflow="fold")
    for cells in rows:
        colour = next((colour for word, colour in COLOURS.items() if cells[1].startswith(word)), "yellow")
        table.add_row(Text(cells[0]), Text(cells[1], style=colour), *cells[2:])
    return table
