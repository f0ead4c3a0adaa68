"""Scoring a checkpoint on a split: every target once, and a report that says what was scored."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lmforge.config.errors import NonFinite
from lmforge.config.runs import RunFolder
from lmforge.data.module import TokenWindows
from lmforge.parallel.precision import ForwardPrecision
from lmforge.tasks.update import UpdateTask
from lmforge.training.checkpoint import Checkpoint, write_json
from lmforge.training.resume import load_weights


class LoadWeights(pl.Callback):
    """Fills the network once it is laid out, before the first batch; scoring starts from nothing else."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        load_weights(pl_module.network, self.checkpoint.reader("weights"))


def report(
    cfg: DictConfig, task: UpdateTask, data: TokenWindows, checkpoint: Checkpoint, precision: Any
) -> dict[str, Any]:
    """Metrics with all that is needed to repeat them."""
    assert isinstance(precision, ForwardPrecision)
    facts = data.manifest["splits"][cfg.split]
    if not all(math.isfinite(value) for value in task.latest.values()):
        raise NonFinite(f"{checkpoint.folder}: the loss on {cfg.split} is not finite")
    return {
        "split": cfg.split,
        **{name.removeprefix("val/"): value for name, value in task.latest.items()},
        "targets": task.scored,
        "documents": facts["documents"] if cfg.limit_batches is None else None,
        "context": data.context,
        "stride": data.stride,
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "hash": checkpoint.hash,
        "precision": precision.describe(),
        "gzip_bits_per_byte": data.manifest.get("gzip_bits_per_byte") if cfg.split == "val" else None,
        "xz_bits_per_byte": data.manifest.get("xz_bits_per_byte") if cfg.split == "val" else None,
    }


def publish(result: dict[str, Any], run: RunFolder) -> Path:
    """Print the table, write it as JSON beside the run's own summary, and return that file."""
    path = run.path / f"evaluation-{result['split']}-step-{result['step']:08d}.json"
    write_json(path, result)
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in result.items():
        if value is not None:
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\nas JSON in {path}", soft_wrap=True)
    return path
