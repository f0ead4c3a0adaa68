"""Going on from a checkpoint: weights, optimizer state, counters, metric sums and the callbacks' states."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from lmforge.config.errors import Exit, Requeue, Terminated, UsageError
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.data.module import TokenWindows
from lmforge.data.tokenizer import Tokenizer
from lmforge.runs.exports import is_export
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.tasks.metrics import TokenMetrics
from lmforge.tasks.update import UpdateTask
from lmforge.training.assemble import warn
from lmforge.training.checkpoint import Checkpoint, PieceReader
from lmforge.training.checkpointing import CheckpointCallback, named_callbacks
from lmforge.training.exported import Exported
from lmforge.training.preemption import Preemption
from lmforge.training.saving import Keep, measurable, whole_checkpoints
from lmforge.training.weights import load_weights, some


@torch.no_grad()
def load_optimizers(
    network: nn.Module, optimizers: list[Optimizer], reader: PieceReader, others: Collection[str] = ()
) -> None:
    """Rebuild the optimizers' state, sharded like the parameters it belongs to; that of `others`, which are on other
    ranks, is left out."""
    parameters = dict(network.named_parameters())
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for name in reader.names():
        parameter_name, _, slot = name.rpartition("/")
        parameter = parameters.get(parameter_name)
        if parameter is None and parameter_name in others:
            continue
        if parameter is None or parameter not in owner:
            raise UsageError(f"the checkpoint holds optimizer state for {parameter_name!r}, which is not trained here")
        dtype, shape = reader.dtype(name), reader.shapes[name]
        if shape == tuple(parameter.shape):
            value = torch.zeros_like(parameter, dtype=dtype)
        else:
            reader.check_whole(name)
            value = torch.zeros(shape, dtype=dtype, device=parameter.device)
        reader.load(name, value)
        owner[parameter].state[parameter][slot] = value


def load_local(task: UpdateTask, checkpoint: Checkpoint, rank: int, world: int) -> None:
    """This rank's running sums; with another number of ranks rank 0 takes the sum of all, the others start at zero."""
    same = checkpoint.state["world_size"] == world
    mine = [rank] if same else list(range(checkpoint.state["world_size"])) if rank == 0 else []
    metrics = task.train_metrics
    for other in mine:
        for name, value in _local_sums(checkpoint, f"local-{other:05d}.safetensors", metrics).items():
            current = getattr(metrics, name)
            setattr(metrics, name, current + value.to(current.device))
    metrics._update_count = max(metrics._update_count, 1)  # on every rank: to compute them is a collective


def _local_sums(checkpoint: Checkpoint, file: str, metrics: TokenMetrics) -> dict[str, Tensor]:
    """One rank's metric sums out of its file, which may come from a stranger."""
    if file not in checkpoint.files:
        raise checkpoint.broken(f"state.json does not name {file}")
    reader = PieceReader([checkpoint.folder / file])
    unknown = [name for name in reader.names() if name.removeprefix("train/") not in metrics._defaults]
    if unknown or any(reader.shapes.values()):
        raise checkpoint.broken(f"{file}: {some(unknown) if unknown else 'a sum'} is no metric of this version")
    return {name.removeprefix("train/"): reader.read(name) for name in reader.names()}


class Restore(pl.Callback):
    """Puts a run back to where a checkpoint left it, before its first step. Must come before the other callbacks."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        state = self.checkpoint.state
        assert pl_module.parallel is not None
        network, names = pl_module.network, pl_module.parallel.names
        load_weights(network, self.checkpoint.reader("weights"), names)
        load_optimizers(network, trainer.strategy.optimizers, self.checkpoint.reader("optimizer"), names)
        load_local(pl_module, self.checkpoint, trainer.global_rank, trainer.world_size)
        pl_module.load_state(state)
        position = self.checkpoint.position(trainer.global_rank)
        if position is not None:
            self._go_on(trainer, position)
        pl_module.latest, pl_module.latest_step = state["metrics"], state["step"]
        self._set_step(trainer, state["step"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, callback in named_callbacks(trainer).items():
            saved = self.checkpoint.state["callbacks"].get(name)
            if saved:
                self._load(name, callback, saved)

    def _go_on(self, trainer: pl.Trainer, position: Any) -> None:
        try:
            trainer.datamodule.go_on(self.checkpoint.step, position)  # type: ignore[attr-defined]
        except (KeyError, TypeError, ValueError) as error:
            raise self.checkpoint.broken(f"the position in the data cannot be that: {error}") from error

    def _load(self, name: str, callback: pl.Callback, saved: dict[str, object]) -> None:
        try:
            callback.load_state_dict(saved)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.checkpoint.broken(f"{name}: {error}") from error

    @staticmethod
    def _set_step(trainer: pl.Trainer, step: int) -> None:
        """Tell Lightning's loops how many batches, which are updates, have been done."""
        loop = trainer.fit_loop.epoch_loop
        counters = (loop.manual_optimization.optim_step_progress.total, loop.batch_progress.total)
        for counter in counters:
            for name in ("ready", "started", "processed", "completed"):
                if hasattr(counter, name):
                    setattr(counter, name, step)
        loop._batches_that_stepped = step


class StartFrom(pl.Callback):
    """`weights=`: a new run that begins with the weights of another, and nothing else of it."""

    def __init__(self, reader: PieceReader):
        self.reader = reader

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        assert pl_module.parallel is not None
        load_weights(pl_module.network, self.reader, pl_module.parallel.names)


def newest_checkpoint(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint whose content is what was written; broken newer ones are named through `report`.

    None when nothing was ever saved; raises UsageError when all that was saved is broken, rather than start again.
    """
    for checkpoint in reversed(whole_checkpoints(folder, report)):
        try:
            checkpoint.verify()
        except UsageError as error:
            report(str(error))
        else:
            return checkpoint
    if list_checkpoints(folder):
        raise UsageError(
            f"every checkpoint in {folder} is incomplete or corrupt; remove them to start from the beginning"
        )
    return None


def find_checkpoint(folder: Path, word: str, keep: Keep, report: Callable[[str], None]) -> Checkpoint:
    """`best`, `last` or a path -> a checkpoint that is whole; raises UsageError when there is none."""
    if word not in ("best", "last"):
        path = Path(word)
        path = path if path.exists() or path.is_absolute() else folder / word
        if not path.exists():
            hint = did_you_mean(nearest(word, [p.name for p in folder.glob("step-*")]))
            raise UsageError(f"ckpt={word}: there is no such checkpoint; allowed: best, last, a folder{hint}")
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    if word == "best":
        best = keep.best_of(whole_checkpoints(folder, report))
        for checkpoint in best[:1]:
            checkpoint.verify()
            return checkpoint
        report(f"ckpt=best: no checkpoint in {folder} has {keep.monitor}; the newest one is used")
    newest = newest_checkpoint(folder, report)
    if newest is None:
        raise UsageError(f"there is no complete checkpoint in {folder}")
    return newest


def check_data(checkpoint: Checkpoint | None, data: TokenWindows) -> None:
    """The order of samples must be the one the checkpoint counted in; raises UsageError when it is not."""
    if checkpoint is None:
        return
    fingerprint, ranks = data.fingerprint, checkpoint.state["world_size"]
    if checkpoint.position(0) is not None and ranks != data.plan.world:
        raise UsageError(
            f"trainer.devices: {checkpoint.folder} holds where each of {ranks} ranks was in its share of a stream, so "
            f"{data.plan.world} cannot go on; resume on {ranks}, or weights= starts anew"
        )
    if checkpoint.state["data"] != fingerprint:
        raise UsageError(
            f"resume: the data are not those of {checkpoint.folder} (fingerprint {checkpoint.state['data']}, now "
            f"{fingerprint}); the text, the tokenizer, the context, the batch or the seed has changed. "
            "weights= starts anew"
        )


def leave_if_stopped(trainer: pl.Trainer, run: RunFolder) -> None:
    """Raise what ends a preempted process with the right code; its state is on disk if checkpoints are written."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Preemption) and callback.stopped is not None:
            error = Requeue if callback.stopped is Exit.REQUEUE else Terminated
            raise error(f"stopped at step {trainer.global_step}{_saved(trainer, run)}")


def _saved(trainer: pl.Trainer, run: RunFolder) -> str:
    if any(isinstance(callback, CheckpointCallback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return f" and saved; go on with: python train.py resume={run.path}"
    return "; nothing was saved, since callbacks.checkpoint is null"


def starting_weights(cfg: DictConfig, data: TokenWindows) -> PieceReader | None:
    """`weights=` of a new run: a run's best checkpoint, an export, a checkpoint folder, or a safetensors file."""
    if cfg.weights is None:
        return None
    path = Path(cfg.weights)
    if path.is_file():
        return PieceReader([path])
    if (path / "config.yaml").is_file() or is_export(path):
        found = find_weights(RunFolder(path), "best", warn)
    else:
        found = Checkpoint(path)
        found.verify()
    check_tokenizer(found, data)
    return found.reader("weights")


def find_weights(run: RunFolder, word: str, report: Callable[[str], None]) -> Checkpoint | Exported:
    """The checkpoint of a run that `word` names, or the weights of an export; whole, else UsageError."""
    if is_export(run.path):
        return Exported(run.path)
    return find_checkpoint(run.checkpoints, word, keep_rule(run), report)


def tokenizer_of(run: RunFolder, found: Checkpoint | Exported) -> Tokenizer:
    """The run's own, checked against what the weights were trained with; raises UsageError where they differ."""
    tokenizer = Tokenizer.load(run.path / "tokenizer.json")
    theirs = (found.tokenizer or {}).get("sha256")
    if theirs not in (None, tokenizer.fingerprint):
        raise UsageError(
            f"{run.path / 'tokenizer.json'} is not the tokenizer of {found.folder}: sha256 {theirs} there, "
            f"{tokenizer.fingerprint} here"
        )
    return tokenizer


def check_tokenizer(checkpoint: Checkpoint | Exported, data: TokenWindows) -> None:
    """Ids must mean the same text in the weights and in the data; raises UsageError naming what differs."""
    theirs, ours = checkpoint.tokenizer, data.manifest.get("tokenizer")
    if theirs is None or ours is None or theirs == ours:
        return
    differing = [f"{key} {theirs.get(key)} there, {ours.get(key)} here" for key in ours if theirs.get(key) != ours[key]]
    raise UsageError(f"{checkpoint.folder} and {data.folder} do not share a tokenizer: {'; '.join(differing)}")


def keep_rule(run: RunFolder) -> Keep:
    """What `best` means for a stored run."""
    node = run.load().callbacks.get("checkpoint")
    if node is None:
        return Keep(1, 1, "val/loss", "min")
    return Keep(1, 1, measurable(node.monitor, (run.path / "tokenizer.json").exists()), node.mode)
