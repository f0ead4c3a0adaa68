"""A progress line for people: steps, tokens, speed, loss, time left; refreshed by time, silent when nobody looks."""

import sys
import time
from typing import Any

import lightning.pytorch as pl

from lmforge.tasks.update import UpdateTask

BAR = 24


class Progress(pl.Callback):
    """Draws on standard error of rank 0 when that is a terminal; a validation's result is printed in any case.

    The line reads nothing from the device: its loss is the last one that was logged.
    """

    def __init__(self, refresh_seconds: float):
        self.refresh = refresh_seconds
        self.drawn = 0.0
        self.start: tuple[float, int, int] | None = None
        self.shown = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        self.shown = trainer.is_global_zero and sys.stderr.isatty()
        self.start = (time.monotonic(), trainer.global_step, pl_module.tokens)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        now = time.monotonic()
        if self.shown and now - self.drawn >= self.refresh:
            assert isinstance(pl_module, UpdateTask)
            self.drawn = now
            self._draw(self._line(trainer, pl_module, now))

    def _line(self, trainer: pl.Trainer, task: UpdateTask, now: float) -> str:
        assert self.start is not None
        began, first_step, first_tokens = self.start
        step, total = trainer.global_step, task.total_steps
        seconds = max(now - began, 1e-9)
        filled = BAR * step // total
        left = (total - step) * seconds / max(step - first_step, 1)
        loss = next((c.train_loss for c in trainer.callbacks if hasattr(c, "train_loss")), None)  # type: ignore[attr-defined]
        parts = [
            f"{'━' * filled}{'╌' * (BAR - filled)} step {step}/{total}",
            f"{human(task.tokens)} tokens",
            f"{human((task.tokens - first_tokens) / seconds)} tokens/s",
            f"loss {loss:.3f}" if loss is not None else "loss …",
            f"{clock(left)} left",
        ]
        return "  ".join(parts)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.shown and trainer.state.fn == "fit":
            self._draw(f"step {trainer.global_step}: validating …")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        if trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        self.clear()
        values = ", ".join(f"{name} {value:.4f}" for name, value in pl_module.latest.items())
        print(f"step {trainer.global_step}: {values}", file=sys.stderr)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clear()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.clear()

    def _draw(self, line: str) -> None:
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def human(number: float) -> str:
    """1234567 -> 1.23M"""
    for unit in ("", "k", "M", "B"):
        if abs(number) < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def clock(seconds: float) -> str:
    """93 -> 1:33"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
