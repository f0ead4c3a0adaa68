"""The callbacks and loggers of a run, in the order in which they must act."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lmforge.config.batch import batch_plan
from lmforge.config.build import build
from lmforge.config.runs import RunFolder
from lmforge.data.module import TokenWindows
from lmforge.training.assemble import device_type, make_precision
from lmforge.training.checkpoint import Checkpoint, PieceReader
from lmforge.training.checkpointing import CheckpointCallback
from lmforge.training.csvlog import cut_rows
from lmforge.training.logbook import Logbook
from lmforge.training.peak import matmul_peak
from lmforge.training.preemption import Preemption
from lmforge.training.resume import Restore, StartFrom


def make_callbacks(
    cfg: DictConfig, run: RunFolder, data: TokenWindows, checkpoint: Checkpoint | None, start: PieceReader | None
) -> list[pl.Callback]:
    """State first, then what writes the log, then what saves: a checkpoint is never ahead of its log."""
    late = {
        "checkpoint": {
            "folder": run.checkpoints,
            "identity": {
                "data": data.fingerprint,
                "split": data.manifest.get("split_sha256"),
                "tokenizer": data.manifest["tokenizer"],
            },
        },
        "throughput": {"every_n_steps": cfg.trainer.log_every_n_steps, "peak_flops": _peak(cfg)},
        "samples": {"seed": cfg.seed},
    }
    named = {name: build(node, **late.get(name, {})) for name, node in cfg.callbacks.items() if node is not None}
    checkpointing = [callback for callback in named.values() if isinstance(callback, CheckpointCallback)]
    others = [callback for callback in named.values() if callback not in checkpointing]
    first: list[pl.Callback] = [Restore(checkpoint)] if checkpoint else [StartFrom(start)] if start else []
    return [*first, Logbook(cfg.trainer.log_every_n_steps), *others, *checkpointing, Preemption()]


def make_loggers(cfg: DictConfig, run: RunFolder, step: int) -> list[Logger]:
    """Loggers that go on where `step` left the run: one log, each step once, the same run in every tracker."""
    late: dict[str, dict[str, Any]] = {
        "csv": {"folder": run.path},
        "tensorboard": {
            "save_dir": cfg.logger.get("tensorboard", {}).get("save_dir") or run.path / "tensorboard",
            "name": "",
            "version": "",
            "purge_step": step + 1 if step else None,
            "default_hp_metric": False,
        },
        "wandb": {"save_dir": cfg.logger.get("wandb", {}).get("save_dir") or run.path, "id": run.id, "resume": "allow"},
    }
    _cut_log(run.path / "metrics.csv", step)
    loggers = [build(node, **late.get(name, {})) for name, node in cfg.logger.items() if node is not None]
    settings = {"config": OmegaConf.to_container(cfg, resolve=True), **_origin(run)}
    for logger in loggers:
        logger.log_hyperparams(settings)
    return loggers


def _origin(run: RunFolder) -> dict[str, Any]:
    """Where the run came from, as the run folder holds it: code version, packages, commands."""
    facts = json.loads((run.path / "provenance.json").read_text(encoding="utf-8"))
    starts = yaml.safe_load((run.path / "overrides.yaml").read_text(encoding="utf-8"))
    return {"provenance": facts, "starts": starts}


@rank_zero_only
def keep_tokenizer(run: RunFolder, data: TokenWindows) -> None:
    """The run folder holds what its weights need to be used, also when the cache is gone."""
    if data.tokenizer is not None:
        data.tokenizer.save(run.path / "tokenizer.json")


@rank_zero_only
def _cut_log(path: Path, step: int) -> None:
    cut_rows(path, step)


def _peak(cfg: DictConfig) -> float | None:
    """The matmul peak of all ranks together, in the compute dtype."""
    device = torch.device(device_type(cfg))
    compute = make_precision(cfg, device.type).compute
    peak = matmul_peak(device, compute, torch.get_num_threads(), Path(cfg.paths.cache))
    return peak * batch_plan(cfg).world if peak else None
