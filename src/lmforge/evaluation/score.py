"""Scoring a checkpoint on a split: every target once, and a report that says what was scored."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig
from rich.console import Console

from lmforge.config.aside import write_aside
from lmforge.config.errors import NonFinite
from lmforge.config.plain import hash_of
from lmforge.data.module import TokenWindows
from lmforge.evaluation import picture, tables
from lmforge.parallel.precision import ForwardPrecision
from lmforge.runs.folder import RunFolder
from lmforge.tasks.update import UpdateTask
from lmforge.training.checkpoint import Checkpoint, write_json
from lmforge.training.exported import Exported
from lmforge.training.weights import load_weights


class LoadWeights(pl.Callback):
    """Fills the network once it is laid out, before the first batch; scoring starts from nothing else."""

    def __init__(self, checkpoint: Checkpoint | Exported):
        self.checkpoint = checkpoint

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        assert pl_module.parallel is not None
        load_weights(pl_module.network, self.checkpoint.reader("weights"), pl_module.parallel.names)


def report(
    cfg: DictConfig,
    task: UpdateTask,
    data: TokenWindows,
    checkpoint: Checkpoint | Exported,
    precision: Any,
    details: dict[str, Any],
) -> dict[str, Any]:
    """Metrics with all that is needed to repeat them; those of `details` are sums of the parts that stand there."""
    assert isinstance(precision, ForwardPrecision)
    facts = data.manifest["splits"][cfg.split]
    references = data.manifest if cfg.split == "val" and cfg.limit_batches is None else {}
    if not all(math.isfinite(value) for value in task.latest.values()):
        raise NonFinite(f"{checkpoint.folder}: the loss on {cfg.split} is not finite")
    return {
        "split": cfg.split,
        **{name.removeprefix("val/"): value for name, value in task.latest.items()},
        **{name: value for name, value in details.items() if isinstance(value, float)},
        "targets": task.scored,
        "documents": facts["documents"] if cfg.limit_batches is None else None,
        "data": data.folder.name,
        "data_hash": hash_of([shard["sha256"] for shard in facts["shards"]])[:16],
        "context": data.context,
        "stride": data.stride,
        "limit_batches": cfg.limit_batches,
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "hash": checkpoint.hash,
        "precision": precision.describe(),
        "plain": cfg.limit_batches is None and cfg.precision.word == "32-true" and _of_the_run(cfg, data, checkpoint),
        "gzip_bits_per_byte": references.get("gzip_bits_per_byte"),
        "xz_bits_per_byte": references.get("xz_bits_per_byte"),
        **{name: value for name, value in details.items() if isinstance(value, dict)},
    }


def _of_the_run(cfg: DictConfig, data: TokenWindows, checkpoint: Checkpoint | Exported) -> bool:
    """Whether a run's own checkpoint met the run's own data, cut into rows as the run's validations cut them."""
    if isinstance(checkpoint, Exported):
        return False
    run = RunFolder(checkpoint.folder.parent.parent)
    if not run.config_file.is_file() or run.path.resolve() != Path(cfg.run).resolve():
        return False
    own, here = run.load().data, cfg.data
    same = all(own.get(key) == here.get(key) for key in ("_target_", "path", "name", "sources", "context", "overlap"))
    identity = data.manifest.get("split_sha256"), data.manifest.get("tokenizer")
    return same and identity == (checkpoint.state.get("split"), checkpoint.tokenizer)


def publish(result: dict[str, Any], run: RunFolder) -> Path:
    """Print the table, write it as JSON beside the run's own summary, and return that file.

    What was scored in another way than a run's own validation has a file of its own.
    """
    way = [result[key] for key in ("data_hash", "context", "stride", "limit_batches", "hash", "precision")]
    suffix = "" if result["plain"] else f"-{hash_of(way)[:8]}"
    path = run.path / f"evaluation-{result['split']}-step-{result['step']:08d}{suffix}.json"
    write_json(path, result)
    console = Console(highlight=False)
    console.print(tables.render(result))
    console.print(f"\nas JSON in {path}", soft_wrap=True, markup=False)
    drawing, file = picture.draw(result), path.with_suffix(".svg")
    if drawing is None:
        file.unlink(missing_ok=True)  # of an earlier evaluation, whose numbers are gone
    else:
        write_aside(file, drawing)
        console.print(f"drawn in   {file}", soft_wrap=True, markup=False)
    return path
