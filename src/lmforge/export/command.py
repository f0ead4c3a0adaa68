"""`lmforge export`: one checkpoint of a run as a folder that needs nothing else."""

import importlib
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lmforge.config.aside import folder_aside
from lmforge.config.errors import UsageError
from lmforge.export.source import Source, dtype_name
from lmforge.runs.folder import RunFolder
from lmforge.training.assemble import warn
from lmforge.training.progress import human
from lmforge.training.resume import find_checkpoint, keep_rule, tokenizer_of


def export(cfg: DictConfig, run: RunFolder) -> Mapping[str, Any]:
    """Write the export unless it is there already; returns its `folder` and what it says of the weights.

    Each format is a module of this package with `write(source, empty folder)` and `same(source, folder)`.
    """
    checkpoint = find_checkpoint(run.checkpoints, cfg.ckpt, keep_rule(run), warn)
    source = Source.open(cfg, run, checkpoint, tokenizer_of(run, checkpoint))
    form = importlib.import_module(f"lmforge.export.{cfg.format}")  # keys.py allows the names of formats only
    out = Path(cfg.out) if cfg.out else _default(run, cfg.format, source)
    there = os.path.lexists(out)
    if there and not form.same(source, out):
        raise UsageError(f"out={out}: is there already and holds something else; nothing is overwritten")
    if not there:
        _check_room(source, out)
        try:
            with folder_aside(out, out.absolute().parent / f".{out.name}.{os.getpid()}.part") as aside:
                form.write(source, aside)
        except OSError as error:
            raise UsageError(f"out={out}: cannot be written: {error.strerror or error}") from error
    _report(source, out, "is there already" if there else "written")
    return {"folder": str(out), **source.head()}


def _default(run: RunFolder, form: str, source: Source) -> Path:
    return run.path / "exports" / f"{form}-{dtype_name(source.dtype)}-{source.checkpoint.folder.name}"


def _check_room(source: Source, out: Path) -> None:
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    needed, free = source.parameters * source.dtype.itemsize, shutil.disk_usage(place).free
    if needed * 1.05 > free:
        raise UsageError(f"out={out}: the weights need {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free")


def _report(source: Source, out: Path, verb: str) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2))
    size = sum(path.stat().st_size for path in out.iterdir())
    tied = ", embedding and output layer share their table" if source.model.get("tied") else ""
    table.add_row("run", f"{source.run.path}, step {source.checkpoint.step}")
    table.add_row("parameters", f"{human(source.parameters)} ({source.parameters}){tied}")
    table.add_row("dtype", dtype_name(source.dtype))
    table.add_row("on disk", f"{size / 1e6:.1f} MB")
    console = Console(highlight=False, markup=False)  # names may hold brackets
    console.print(table)
    console.print(f"export      {out} ({verb})\n", soft_wrap=True)
    console.print("next")
    typed = shlex.quote(str(out))
    for command in (f"lmforge generate run={typed} prompt='import '", f"python train.py weights={typed}"):
        console.print(f"  {command}", soft_wrap=True)
