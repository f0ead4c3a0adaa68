"""When to save: every n steps, at a new best, at the end and before a preempted run stops."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lmforge.tasks.update import UpdateTask
from lmforge.training.checkpoint import Piece
from lmforge.training.logbook import flush
from lmforge.training.saving import Keep, Saver, optimizer_pieces, weight_pieces, whole_checkpoints

DEAD_RANKS_SECONDS = 10.0  # how long a failing rank 0 waits for parts that may never come


class CheckpointCallback(pl.Callback):
    """Saves at step borders, after a validation that falls on the same step, so its metrics are in the checkpoint.

    `best` is the best of the whole history on disk, so a resumed run neither forgets it nor keeps too many.
    `identity` (fingerprint of the data, tokenizer) goes into every checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        every_n_steps: int,
        keep_last: int,
        keep_best: int,
        monitor: str,
        mode: str,
    ):
        self.folder, self.identity, self.every = Path(folder), identity, every_n_steps
        self.keep = Keep(keep_last, keep_best, monitor, mode)
        self.saved_step = 0
        self.saver: Saver | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        task = _task(pl_module)
        self.saver = Saver(self.folder, trainer.global_rank, trainer.world_size, self.keep)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.saver.clean()
        task.control.barrier()
        task.requests["failed"] = self.saver.failed
        task.before_update.append(self.saver.let_change)
        self.saved_step = trainer.global_step  # what a resumed run started from is on disk

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        task = _task(pl_module)
        if task.agreed.failed:
            assert self.saver is not None
            self.saver.settle(task.control)
        if (task.agreed.stops or self._due(trainer)) and not task.validates(trainer.global_step):
            self.save(trainer, task)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        task = _task(pl_module)
        if trainer.state.fn == "fit" and (task.agreed.stops or self._due(trainer) or self._improved(task)):
            self.save(trainer, task)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last state is always kept, and on disk before the process goes on."""
        task = _task(pl_module)
        self.save(trainer, task)
        assert self.saver is not None
        self.saver.settle(task.control)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let a save in flight finish, which holds a good state, but do not wait long for ranks that may be dead."""
        if self.saver is not None:
            self.saver.patience = min(self.saver.patience, DEAD_RANKS_SECONDS)
            self.saver.join()

    def save(self, trainer: pl.Trainer, task: UpdateTask) -> None:
        """Start a save of the present step unless it is there already. Every rank calls this at the same step."""
        step = trainer.global_step
        if step == self.saved_step:
            return
        assert self.saver is not None
        self.saver.settle(task.control)
        self.saved_step = step
        flush(trainer)
        metrics = task.latest if task.latest_step == step else {}
        callbacks = {name: kept for name, c in named_callbacks(trainer).items() if (kept := c.state_dict())}
        samples = trainer.datamodule.samples_at(step)  # type: ignore[attr-defined]
        state = {
            **task.state(),
            "samples": samples,
            "metrics": _finite(metrics),
            "callbacks": callbacks,
            **self.identity,
        }
        self.saver.save(state, pieces_of(task, trainer), trainer.datamodule.position(step))  # type: ignore[attr-defined]

    def _due(self, trainer: pl.Trainer) -> bool:
        return self.every > 0 and trainer.global_step % self.every == 0

    def _improved(self, task: UpdateTask) -> bool:
        """Whether the metric just measured is among the best to keep; the same on all ranks, which share the disk."""
        value = self.keep.value({"metrics": task.latest})
        if value is None or self.keep.best == 0:
            return False
        assert self.saver is not None
        self.saver.settle(task.control)
        verdict = 0
        if self.saver.rank == 0:
            best = self.keep.best_of(whole_checkpoints(self.folder))[: self.keep.best]
            worst = self.keep.value(best[-1].state) if len(best) == self.keep.best else None
            verdict = int(worst is None or value < worst)
        return task.control.any(verdict)


def pieces_of(task: UpdateTask, trainer: pl.Trainer) -> dict[str, dict[str, Piece]]:
    """Everything of this rank that a checkpoint holds, by kind of file."""
    assert task.parallel is not None
    task.parallel.settle()
    sums = {f"train/{name}": getattr(task.train_metrics, name) for name in task.train_metrics._defaults}
    return {
        "weights": weight_pieces(task.network, task.parallel),
        "optimizer": optimizer_pieces(task.network, trainer.strategy.optimizers, task.parallel),
        "local": {name: Piece(value, (), ()) for name, value in sums.items()},
    }


def named_callbacks(trainer: pl.Trainer) -> dict[str, pl.Callback]:
    """The trainer's callbacks by class name; a second one of its class is `Name-2`."""
    named: dict[str, pl.Callback] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        before = sum(type(other) is type(callback) for other in named.values())
        named[f"{name}-{before + 1}" if before else name] = callback
    return named


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value == value and abs(value) != float("inf")}


def _task(module: pl.LightningModule) -> UpdateTask:
    assert isinstance(module, UpdateTask)
    return module
