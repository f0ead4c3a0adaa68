"""Tokens per second, model FLOPs utilisation, waiting for data, memory: over the whole run and per interval."""

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lmforge.tasks.update import UpdateTask
from lmforge.training.logbook import log
from lmforge.training.resources import Resources

DATA_WAIT_WARNING = 0.10  # share of the training time
SAMPLE_WARNING = 1e-3  # seconds to build one sample


class Throughput(pl.Callback):
    """Times training alone: validations, samples and the first `warmup_steps` steps of the process do not count.

    `peak_flops` is the machine's matmul peak over all ranks in FLOP/s, or None when it is not known.
    """

    def __init__(self, warmup_steps: int, every_n_steps: int, peak_flops: float | None):
        self.warmup, self.every, self.peak = warmup_steps, every_n_steps, peak_flops
        self.steps = 0
        self.seconds = self.wait = 0.0
        self.tokens = 0
        self.mark: tuple[float, float, int] | None = None
        self.resources: Resources | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, UpdateTask)
        if self.steps >= self.warmup and self.mark is None and not pl_module.apart:
            self.mark = self._now(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, UpdateTask)
        self.steps += 1
        step = trainer.global_step
        if self.mark is not None and (step % self.every == 0 or pl_module.validates(step)):
            speed = self._close(trainer, pl_module)
            log(trainer, {"speed/tokens_per_second": speed, "speed/data_wait_share": self.data_wait_share}, step)
            if not pl_module.validates(step):
                self.mark = self._now(trainer, pl_module)  # so that waiting for the next batch counts

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        if self.mark is not None:
            self._close(trainer, pl_module)
        self.resources = Resources.gather(pl_module.control, trainer.strategy.root_device)

    def _now(self, trainer: pl.Trainer, task: UpdateTask) -> tuple[float, float, int]:
        return time.perf_counter(), trainer.datamodule.train_loader.wait_seconds, task.tokens  # type: ignore[attr-defined]

    def _close(self, trainer: pl.Trainer, task: UpdateTask) -> float:
        """Add the interval since the mark to the totals and return its tokens per second; work on a GPU is awaited."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        assert self.mark is not None
        began, waited, tokens = self.mark
        now, wait, total = self._now(trainer, task)
        self.mark = None
        self.seconds += now - began
        self.wait += wait - waited
        self.tokens += total - tokens
        return (total - tokens) / max(now - began, 1e-9)

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens of all ranks per second of training."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def data_wait_share(self) -> float:
        return self.wait / self.seconds if self.seconds else 0.0

    def utilisation(self, flops_per_token: float) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022): FLOPs the network needs over what the machine could do."""
        speed = self.tokens_per_second
        return speed * flops_per_token / self.peak if speed and self.peak else None

    def warnings(self, trainer: pl.Trainer) -> list[str]:
        """What slows the run on the data's side."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        loader, found = data.train_loader, []
        if self.data_wait_share > DATA_WAIT_WARNING:
            found.append(f"{self.data_wait_share:.0%} of the training time went into waiting for data; {data.faster}")
        if loader is not None and loader.samples and loader.build_seconds / loader.samples > SAMPLE_WARNING:
            found.append(
                f"building a sample takes {1e3 * loader.build_seconds / loader.samples:.2f} ms; prepare more beforehand"
            )
        return found
