"""Being asked to stop: signals and notices set a flag, the ranks agree at a step border, save, and leave."""

import signal
import threading
from types import FrameType
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lmforge.config.errors import Exit
from lmforge.tasks.update import UpdateTask
from lmforge.training.notice import Notice, asks_of


class _QuietSignals(_SignalConnector):
    """Lightning's handlers broadcast inside the handler and save inside it under Slurm; here they do nothing."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False


def replace_lightnings_signals(trainer: pl.Trainer) -> None:
    """Also drops the broadcast before every batch (0.8 ms a step on two CPU ranks): `Control.agree` does that."""
    trainer._signal_connector = _QuietSignals(trainer)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


class Preemption(pl.Callback):
    """SIGTERM ends the run with code 143, SIGUSR1 with 85 (requeue), both after a save all ranks took part in.

    A notice that the machine will be taken away counts as SIGUSR1: `notice_url` is a word of `CLOUDS` or an address,
    `notice_file` a file that appears; one rank of each node looks every `notice_seconds`. Any one rank is enough: the
    flag travels with the step's agreement. Must come after the checkpoint callback.
    """

    SIGNALS: ClassVar = {signal.SIGTERM: "terminate", signal.SIGUSR1: "requeue"}

    def __init__(
        self, notice_url: str | None = None, notice_file: str | None = None, notice_seconds: float = 5.0
    ) -> None:
        self.asks, self.seconds = asks_of(notice_url, notice_file), notice_seconds
        self.notice: Notice | None = None
        self.asked: dict[str, int] = dict.fromkeys(self.SIGNALS.values(), 0)
        self.before: dict[signal.Signals, Any] = {}
        self.stopped: Exit | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        pl_module.requests["terminate"] = lambda: self.asked["terminate"]
        pl_module.requests["requeue"] = lambda: self.asked["requeue"]
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        if self.asks and trainer.local_rank == 0:
            self.notice = Notice(self.asks, self.seconds, lambda: self.asked.update(requeue=1))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked[self.SIGNALS[signal.Signals(number)]] = 1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._stop_if_agreed(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._stop_if_agreed(trainer, pl_module)

    def _stop_if_agreed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        if pl_module.agreed.stops and trainer.global_step < pl_module.total_steps:
            self.stopped = Exit.REQUEUE if pl_module.agreed.requeue else Exit.SIGTERM
            pl_module.stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
        if self.notice is not None:
            self.notice.stop()
