"""What is measured goes to the loggers here and only here: one write every n steps and one a validation."""

from typing import Any

import lightning.pytorch as pl

from lmforge.tasks.update import UpdateTask


class Logbook(pl.Callback):
    """Logs the token-weighted training loss since the last write, rate, gradient norm and tokens, by step.

    Sums stay on the device until they are written; between two writes a step logs nothing. A run that is stopped there
    takes the sums along in its checkpoint, so its rows are those of a run that was not stopped.
    """

    def __init__(self, every_n_steps: int):
        self.every = every_n_steps
        self.train_loss: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        assert isinstance(pl_module, UpdateTask)
        if step % self.every == 0 or step == pl_module.total_steps:
            self._write(trainer, pl_module, step)

    def _write(self, trainer: pl.Trainer, task: UpdateTask, step: int) -> None:
        values = {
            "train/lr": task.learning_rate,
            "train/grad_norm": float(task.gradient_norm),
            "train/tokens": float(task.tokens),
            "train/epoch": trainer.datamodule.epochs(step),  # type: ignore[attr-defined]
        }
        if task.train_metrics.update_called:
            measured = task.train_metrics.compute()
            task.train_metrics.reset()
            if "loss" in measured:
                self.train_loss = values["train/loss"] = measured["loss"]
        values |= trainer.datamodule.by_source(step)  # type: ignore[attr-defined]
        assert task.parallel is not None
        if task.parallel.traffic is not None:
            values["comm/bytes_per_step"] = task.parallel.traffic.sent
        if task.skipped:
            values["train/skipped"] = float(task.skipped)
        log(trainer, values, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        if trainer.state.fn == "fit":
            log(trainer, pl_module.latest, pl_module.latest_step)


def log(trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)


def flush(trainer: pl.Trainer) -> None:
    """Everything logged so far to disk: a checkpoint must not be ahead of the log."""
    for logger in trainer.loggers:
        logger.save()
