"""One Lightning batch is one optimizer update: the step that every training objective shares."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmforge.config.errors import NonFinite
from lmforge.data.randomness import seed_streams
from lmforge.data.windows import Window
from lmforge.parallel.control import Agreed, Control
from lmforge.parallel.parallel import Parallel
from lmforge.parallel.plan import Plan
from lmforge.parallel.precision import ForwardPrecision
from lmforge.tasks.metrics import Counts, TokenMetrics, TokenScores


class UpdateTask(pl.LightningModule):
    """Manual optimisation over a window of micro-batches; subclasses say what a micro-batch's loss is.

    The count of target tokens of the whole global batch is agreed first and every loss divided by it before its
    backward, so accumulation, padding, a short last window or the number of ranks never change the gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        make_optimizers: Callable[..., list[Optimizer]],
        schedule: Callable[[int, int], float],  # (step, total) -> factor of the peak rate
        total_steps: int,
        plan: Plan,
        seed: int,
        clip_norm: float | None,
        nonfinite_patience: int,
        initialise: bool = True,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.network = network  # which a pipeline will hold a part of
        self.parameter_count = sum(p.numel() for p in network.parameters())
        self.make_optimizers, self.schedule, self.total_steps = make_optimizers, schedule, total_steps
        self.plan, self.seed, self.clip_norm, self.patience = plan, seed, clip_norm, nonfinite_patience
        self.initialise = initialise
        self.parallel: Parallel | None = None
        self.train_metrics, self.val_metrics = TokenMetrics(), TokenMetrics()
        self.agreed = Agreed(0)
        self.requests: dict[str, Callable[[], int]] = {}  # what callbacks bring to the agreement, by field of `Agreed`
        self.around_gradients: AbstractContextManager[Any] | None = None  # who watches forward and backward passes
        self.before_update: list[Callable[[], None]] = []  # what has to be done before weights change
        self.targets = 1  # of the global batch that is computed
        self.tokens = 0  # target tokens since the start of the run
        self.skipped = 0  # updates left out because something was not finite
        self.failures = 0  # of these the last ones in a row
        self.micro_batch = 0  # the one that is computed, counted from 1 in its update
        self.learning_rate = 0.0
        self.gradient_norm = torch.zeros(())
        self.latest: dict[str, float] = {}  # metrics of the last validation, which ran after step `latest_step`
        self.latest_step = 0
        self.by_source: dict[str, TokenMetrics] = {}  # the last validation, by the source of a mixture
        self.watch: Callable[[TokenScores], None] | None = None  # sees each scored token, outside training
        self.scored = 0  # target tokens of the last validation, over all ranks

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """What the network takes of a micro-batch: ids, document numbers, positions."""
        return batch["input_ids"], batch["doc_ids"], batch["positions"]

    def measure(self, hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor) -> Counts:
        """Counts from the last hidden state `[batch, time, width]`, of which `head` makes logits; `loss` is a sum over
        targets and carries the gradient."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its loss is")

    def count(self, batch: dict[str, Tensor]) -> Counts:
        """Run the network on one micro-batch."""
        assert self.parallel is not None
        batch = self.parallel.share(batch)
        return self.measure(self.parallel.forward(*self.inputs(batch)), _as_it_is, batch["labels"])

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning assigns the hook's name some 20 times a step, and a module looks at every value for parameters."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _on_before_batch_transfer(self, batch: Window, dataloader_idx: int = 0) -> Window:
        return batch

    def _apply_batch_transfer_handler(
        self, batch: Window, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Window:
        """Windows are where a CPU needs them; asking every hook of a transfer would cost a tenth of a millisecond."""
        where = device or self.device
        return batch if where.type == "cpu" else super()._apply_batch_transfer_handler(batch, where, dataloader_idx)

    def configure_model(self) -> None:
        if self.parallel is None:
            seed = self.seed if self.initialise else None
            self.parallel = self.plan.apply(self.network, self.precision, self.trainer.strategy.root_device, seed)
            self.control = Control()
            for metrics in (self.train_metrics, self.val_metrics):
                metrics.to(self.trainer.strategy.root_device)

    def configure_optimizers(self) -> list[Optimizer]:
        return self.make_optimizers(network=self.network)

    @property
    def precision(self) -> ForwardPrecision:
        plugin = self.trainer.precision_plugin
        assert isinstance(plugin, ForwardPrecision)
        return plugin

    def on_fit_start(self) -> None:
        """Every rank looks for checkpoints by itself; one that found another would train on apart from the rest."""
        steps = self.control.gather(self.global_step)
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks found different checkpoints, by rank at step {steps}; start again")

    def training_step(self, window: Window, batch_index: int) -> None:
        step = self.global_step + 1
        brought = {field: request() for field, request in self.requests.items()}
        assert self.parallel is not None
        self.agreed = self.control.agree(Agreed(window["targets"] if self.parallel.speaks else 0, **brought))
        if step == self.total_steps and self.trainer.val_check_batch not in (None, float("inf")):
            self.trainer.val_check_batch = step  # the last update is always validated
        self.learning_rate = set_learning_rate(self.trainer.strategy.optimizers, self.schedule(step, self.total_steps))
        self._seed(step)
        with self.around_gradients or nullcontext():
            counted = self._accumulate(window["micro_batches"], max(self.agreed.targets, 1))
        self.precision.unscale(self.trainer.strategy.optimizers)
        self.gradient_norm = self._clip()
        self._finish(counted, finite=bool(torch.isfinite(self.gradient_norm)))

    def _seed(self, step: int) -> None:
        """Dropout is a function of (seed, rank, step), so an exact resume needs no generator's state."""
        seed_streams(self.seed, self.global_rank, step, 1)

    def _accumulate(self, micro_batches: list[dict[str, Tensor]], targets: int) -> list[Counts]:
        """Forward and backward passes; `targets` of the whole global batch divide the loss."""
        assert self.parallel is not None
        self.targets = targets
        return self.parallel.window(micro_batches, self)

    def _clip(self) -> Tensor:
        """The norm of the whole gradient, over all ranks, measured before it is clipped."""
        assert self.parallel is not None
        norm = self.parallel.norm()
        if self.clip_norm is not None:
            self.parallel.clip(norm, self.clip_norm)
        return norm

    def weighed(self, counts: Counts) -> Tensor:
        """The loss whose gradient is this rank's part of the update's."""
        assert self.parallel is not None
        # a loss that is not finite can have finite gradients; this way every rank sees it in them
        seen = torch.where(counts.loss.isfinite(), 1.0, torch.nan)
        # ranks average their gradients, so the mean over all targets needs the factor back
        return self.precision.scaled(counts.loss * seen * (self.parallel.size / self.targets))

    def _finish(self, counted: list[Counts], finite: bool) -> None:
        """Apply or skip the update; a skipped one still is a step and its batch is spent."""
        optimizers = self.trainer.strategy.optimizers
        for prepare in self.before_update:
            prepare()
        failed = not finite and not self._only_overflowed(counted)
        assert self.parallel is not None
        self.parallel.update(self.precision, optimizers, finite)
        if finite:
            self.train_metrics.add(counted if self.parallel.reports else ())
        self.tokens += self.agreed.targets
        self.skipped += not finite
        self.failures = self.failures + 1 if failed else 0
        self._count_step()
        if self.failures >= self.patience:
            raise NonFinite(
                f"loss or gradient was not finite in {self.failures} updates in a row, the last one {self.global_step}"
            )

    def _only_overflowed(self, counted: list[Counts]) -> bool:
        """Whether the scaled float16 gradients were too large while every rank's loss was a number: part of the search
        for the scale and no failure. All ranks ask and get the same answer."""
        lost = not all(bool(counts.loss.isfinite()) for counts in counted)
        return self.precision.searches and not self.control.any(lost)

    def _count_step(self) -> None:
        """Lightning counts the steps of its own optimizer wrapper; the raw optimizers used here are counted by hand."""
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()

    def validation_step(self, window: Window, batch_index: int) -> None:
        metrics = [self.val_metrics]
        if source := window.get("source"):
            new = TokenMetrics().to(self.val_metrics.loss.device)
            metrics.append(self.by_source.setdefault(source, new))
        assert self.parallel is not None
        for batch in window["micro_batches"]:
            counts = self.parallel.score(batch, self)
            for each in metrics:
                each.add([counts] if counts is not None and self.parallel.reports else ())

    def validates(self, step: int) -> bool:
        """Whether a validation follows this step."""
        every = self.trainer.val_check_batch
        return every is not None and sum(self.trainer.num_val_batches) > 0 and step % every == 0

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset()
        self.by_source = {}

    def on_validation_epoch_end(self) -> None:
        self.latest = {f"val/{name}": value for name, value in self.val_metrics.compute().items()}
        for source, metrics in self.by_source.items():
            values = metrics.compute()
            self.latest |= {f"val/{source}/{n}": values[n] for n in ("loss", "bits_per_byte") if n in values}
        self.latest_step = self.global_step
        self.scored = self.control.agree(Agreed(int(self.val_metrics.targets))).targets

    def stop(self) -> None:
        """End training after this step; a validation that falls on it still runs."""
        self.trainer.fit_loop.epoch_loop.max_steps = self.global_step

    def state(self) -> dict[str, Any]:
        """What must survive beside weights, optimizer state and metrics: plain numbers, equal on all ranks."""
        return {
            "step": self.global_step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "failures": self.failures,
            "total_steps": self.total_steps,
            "scaler": self.precision.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.tokens, self.skipped, self.failures = state["tokens"], state["skipped"], state["failures"]
        if state["scaler"]:
            self.precision.load_state_dict(state["scaler"])


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def set_learning_rate(optimizers: Iterable[Optimizer], factor: float) -> float:
    """Scale every group's peak rate by `factor`; returns the first group's rate, the one that is logged."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = group["peak_lr"] * factor
    return groups[0]["lr"]
