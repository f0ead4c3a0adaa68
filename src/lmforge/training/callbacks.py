"""The callbacks and loggers of a run, in the order in which they must act."""

import json
from dataclasses import asdict
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
from lmforge.config.errors import UsageError
from lmforge.data.module import TokenWindows
from lmforge.runs.folder import RunFolder
from lmforge.runs.rows import cut_rows
from lmforge.training.assemble import device_type, entries, make_precision, warn
from lmforge.training.checkpoint import Checkpoint, PieceReader
from lmforge.training.checkpointing import CheckpointCallback
from lmforge.training.logbook import Logbook
from lmforge.training.matmul_share import MatmulShare
from lmforge.training.out_of_memory import MemoryGuard
from lmforge.training.peak import matmul_peak
from lmforge.training.preemption import Preemption
from lmforge.training.resume import Restore, StartFrom
from lmforge.training.saving import measurable


def make_callbacks(
    cfg: DictConfig, run: RunFolder, data: TokenWindows, checkpoint: Checkpoint | None, start: PieceReader | None
) -> list[pl.Callback]:
    """What watches first, then state, then what writes the log, then what saves: a checkpoint is never ahead of its
    log."""
    monitors = _monitors(cfg, data)
    late: dict[str, dict[str, Any]] = {
        "checkpoint": {
            "folder": run.checkpoints,
            "identity": {
                "data": data.fingerprint,
                "split": data.manifest.get("split_sha256"),
                "tokenizer": data.manifest.get("tokenizer"),
                "layout": asdict(data.plan.layout),
            },
            **monitors.get("checkpoint", {}),
        },
        "early_stopping": monitors.get("early_stopping", {}),
        "throughput": {"every_n_steps": cfg.trainer.log_every_n_steps, "peak_flops": _peak(cfg)},
        "samples": {"seed": cfg.seed},
        "stall": {"run": run},
        "straggler": {"every_n_steps": cfg.trainer.log_every_n_steps},
    }
    named = {name: build(node, **late.get(name, {})) for name, node in entries(cfg.callbacks).items()}
    checkpointing = [callback for callback in named.values() if isinstance(callback, CheckpointCallback)]
    leaving = [callback for callback in named.values() if isinstance(callback, Preemption)] or [Preemption()]
    others = [callback for callback in named.values() if callback not in [*checkpointing, *leaving]]
    first: list[pl.Callback] = [Restore(checkpoint)] if checkpoint else [StartFrom(start)] if start else []
    logbook = Logbook(cfg.trainer.log_every_n_steps)
    return [MemoryGuard(cfg, run), *first, MatmulShare(), logbook, *others, *checkpointing, *leaving]


def _monitors(cfg: DictConfig, data: TokenWindows) -> dict[str, dict[str, str]]:
    """What each callback that decides by a metric watches in place of one that can never be measured.

    Raises UsageError when a run is to stop by a validation that it will not have.
    """
    watching = {name: node for name, node in entries(cfg.callbacks).items() if name in ("checkpoint", "early_stopping")}
    if "early_stopping" in watching and watching["early_stopping"].patience is None:
        del watching["early_stopping"]
    if "early_stopping" in watching and not data.has("val"):
        raise UsageError(
            f"callbacks.early_stopping.patience={watching['early_stopping'].patience}: {data.folder} has no validation "
            "tokens to watch; callbacks.early_stopping.patience=null"
        )
    known = data.tokenizer is not None
    replaced = [name for name, node in watching.items() if measurable(node.monitor, known) != node.monitor]
    if replaced and data.has("val"):
        keys = ", ".join(f"callbacks.{name}.monitor" for name in replaced)
        warn(f"{keys}: val/loss, since {data.folder} has no tokenizer.json to count val/bits_per_byte by")
    return {name: {"monitor": measurable(watching[name].monitor, known)} for name in replaced}


def make_loggers(cfg: DictConfig, run: RunFolder, step: int) -> list[Logger]:
    """Loggers that go on where `step` left the run: one log, each step once, the same run in every tracker."""
    named = entries(cfg.logger)
    places = {name: node.get("save_dir") for name, node in named.items()}
    late: dict[str, dict[str, Any]] = {
        "csv": {"folder": run.path},
        "tensorboard": {
            "save_dir": places.get("tensorboard") or run.path / "tensorboard",
            "name": "",
            "version": "",
            "purge_step": step + 1 if step else None,
            "default_hp_metric": False,
        },
        "wandb": {"save_dir": places.get("wandb") or run.path, "id": run.id, "resume": "allow"},
    }
    _cut_log(run.path / "metrics.csv", step)
    loggers = [build(node, **late.get(name, {})) for name, node in named.items()]
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
