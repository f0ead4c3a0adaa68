"""Which rank keeps the others waiting: how long each computes, without what it waits for others."""

import time
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lmforge.parallel.waits import Waits
from lmforge.tasks.update import UpdateTask
from lmforge.training.assemble import warn
from lmforge.training.logbook import log

PERSISTENT = 3  # intervals in a row, or at least so many and most of them

Stamp = float | torch.cuda.Event


class Span(NamedTuple):
    """One step of one rank, from its last update to its complete gradient."""

    before: float  # seconds until it came to the step: data, log, save
    arrived: Stamp
    complete: Stamp
    waited: float  # seconds of all that in which it waited for others

    @property
    def own(self) -> float:
        return max(0.0, self.before + _seconds(self.arrived, self.complete) - self.waited)


class Straggler(pl.Callback):
    """Logs the rank that computes longest, `speed/straggler_rank`, and how much longer than the median of the others,
    `speed/straggler_excess` (0.2 = a fifth); warns of a rank that stays above `warn_above`.

    The gradient is complete when its last part is, before the reduction is waited for. Waiting that is taken off: the
    ranks' agreements, and on CPUs FSDP's collectives. Ranks that meet otherwise inside the network (tensor, pipeline
    and context parallel; FSDP on GPUs) wait for each other there and show as one. Validations are not counted.
    """

    def __init__(self, every_n_steps: int, warn_above: float):
        self.every, self.above = every_n_steps, warn_above
        self.sharded = Waits()
        self.spans: list[Span] = []
        self.updated: tuple[float, float] | None = None  # when the last update came, and the waiting until then
        self.before = 0.0
        self.arrived: Stamp = 0.0
        self.complete: tuple[Stamp, float] | None = None  # when the gradient was complete, and the waiting until then
        self.found: list[tuple[int, float]] = []  # slowest rank and excess of each interval
        self.warned: set[int] = set()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        self.task, self.device = pl_module, trainer.strategy.root_device
        if pl_module.control.world == 1:
            return
        first = next(p for p in pl_module.network.parameters() if p.requires_grad)  # the last to get its gradient
        first.register_post_accumulate_grad_hook(self._note_gradient)
        pl_module.before_update.append(self._note_update)
        if self.device.type == "cpu":
            self.sharded.watch(pl_module.network)

    def on_train_batch_start(self, *args: Any) -> None:
        if self.updated is not None:
            self.before, self.arrived = time.perf_counter() - self.updated[0], self._stamp()

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self.complete = self._stamp(), self._waited()

    def _note_update(self) -> None:
        if self.updated is not None:
            complete, waited = self.complete or (self._stamp(), self._waited())
            self.spans.append(Span(self.before, self.arrived, complete, waited - self.updated[1]))
        self.updated, self.complete = (time.perf_counter(), self._waited()), None

    def on_validation_start(self, *args: Any) -> None:
        self.updated = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step % self.every or not self.spans:
            return
        own, self.spans = sum(span.own for span in self.spans), []
        rank, excess = slowest([each / 1e6 for each in self.task.control.gather(round(1e6 * own))])
        log(trainer, {"speed/straggler_rank": float(rank), "speed/straggler_excess": excess}, step)
        self._judge(rank, excess)

    def _judge(self, rank: int, excess: float) -> None:
        self.found.append((rank, excess))
        lately = [who for who, much in self.found[-PERSISTENT:] if much > self.above]
        if lately == [rank] * PERSISTENT and rank not in self.warned:
            self.warned.add(rank)
            warn(f"rank {rank} computes {excess:.0%} longer than the others, which wait for it")

    @property
    def warning(self) -> str | None:
        """The rank that was slow in most of the run, if one was."""
        slow = [(rank, excess) for rank, excess in self.found if excess > self.above]
        (rank, count), *_ = Counter(who for who, _ in slow).most_common(1) or [(0, 0)]
        if count < PERSISTENT or 2 * count <= len(self.found):
            return None
        mean = sum(excess for who, excess in slow if who == rank) / count
        return (
            f"rank {rank} computed {mean:.0%} longer than the others in {count} of {len(self.found)} intervals, and "
            "they waited for it; look at its machine (clock rate, other programs, storage)"
        )

    def _stamp(self) -> Stamp:
        """Now, as the device sees it: a GPU is behind its host."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _waited(self) -> float:
        return self.task.control.waited + self.sharded.seconds


def slowest(seconds: list[float]) -> tuple[int, float]:
    """The rank that took longest, and by which share it exceeds the median of the others."""
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    usual = median(seconds[:rank] + seconds[rank + 1 :])
    return rank, seconds[rank] / usual - 1.0 if usual > 0 else 0.0


def _seconds(start: Stamp, end: Stamp) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(end, float)
    return end - start
