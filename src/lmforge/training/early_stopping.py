"""Stop when the monitored metric has not improved for some validations."""

import math
from typing import Any

import lightning.pytorch as pl

from lmforge.tasks.update import UpdateTask


class EarlyStop(pl.Callback):
    """Counts validations without an improvement of more than `min_delta`; a patience of None turns it off.

    A metric that is not finite is ignored: neither an improvement nor a failure. The count is in the checkpoint.
    """

    def __init__(self, monitor: str, mode: str, patience: int | None, min_delta: float):
        self.monitor, self.sign, self.patience, self.min_delta = (
            monitor,
            1 if mode == "min" else -1,
            patience,
            min_delta,
        )
        self.best: float | None = None
        self.waited = 0
        self.stopped = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        value = pl_module.latest.get(self.monitor)
        if self.patience is None or trainer.state.fn != "fit" or value is None or not math.isfinite(value):
            return
        if self.best is None or self.sign * value < self.sign * self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.stopped = True
            pl_module.stop()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that was killed between its decision to stop and its end still ends."""
        assert isinstance(pl_module, UpdateTask)
        if self.patience is not None and self.waited >= self.patience:
            self.stopped = True
            pl_module.stop()

    @property
    def state_key(self) -> str:
        """Lightning allows several of a class only under keys that differ."""
        return self._generate_state_key(monitor=self.monitor, sign=self.sign, min_delta=self.min_delta)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited} if self.patience is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        self.best, self.waited = None if best is None else float(best), int(state_dict["waited"])
