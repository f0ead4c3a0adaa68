"""The update step on hand-made losses: weights of tokens, what is not finite, random streams."""

import math
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from builders import random_ids, tiny_gpt
from lmforge.config.errors import NonFinite
from lmforge.parallel.parallel import Parallel
from lmforge.parallel.plan import Plan
from lmforge.parallel.precision import ForwardPrecision
from lmforge.tasks.metrics import Counts
from lmforge.tasks.update import UpdateTask
from lmforge.training.schedules import Constant

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(val_dataloader|many workers|LeafSpec|logging interval)"),
]


class Weight(nn.Module):
    """A network of one number that starts at 1."""

    block_class = nn.Identity

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(1))

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.ones(shape)


class Scripted(UpdateTask):
    """Every micro-batch says its own sum of losses: `slope` x weight + `offset`."""

    compute = torch.float32

    def __init__(self, **options: Any):
        settings = {"clip_norm": None, "nonfinite_patience": 3, "seed": 0, **options}
        network = Weight()
        super().__init__(
            network=network,
            make_optimizers=lambda network: [torch.optim.SGD([{"params": network.parameters(), "peak_lr": 0.01}])],
            schedule=Constant(),
            total_steps=100,
            plan=Plan("single"),
            **settings,
        )
        self.norms: list[float] = []
        self.weights: list[float] = []
        self.draws: list[float] = []

    def count(self, batch: dict[str, Tensor]) -> Counts:
        self.draws.append(torch.rand(()).item())
        none = torch.zeros((), dtype=torch.int64)
        slope = (self.network.w.to(self.compute) * batch["slope"].to(self.compute)).float()
        return Counts(slope.sum() + batch["offset"], batch["targets"], none, none)

    def on_train_batch_end(self, *args: Any) -> None:
        self.norms.append(float(self.gradient_norm))
        self.weights.append(self.network.w.item())


def micro(slope: float, targets: int = 1, offset: float = 0.0) -> dict[str, Tensor]:
    return {"slope": torch.tensor(slope), "offset": torch.tensor(offset), "targets": torch.tensor(targets)}


def window(*micro_batches: dict[str, Tensor]) -> dict[str, Any]:
    targets = sum(int(batch["targets"]) for batch in micro_batches)
    return {"micro_batches": list(micro_batches), "targets": targets, "samples": 1, "seconds": 0.0}


def run(task: Scripted, windows: Iterable[dict[str, Any]], scaler: bool = False) -> Scripted:
    """One update a window, by SGD at rate 0.01."""
    precision = ForwardPrecision("test", "float32", "float32", "float32", scaler, "cpu")
    pl.Trainer(
        accelerator="cpu",
        plugins=[precision],
        max_steps=100,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, DataLoader(list(windows), batch_size=None))
    return task


def test_micro_batches_of_3_and_1_targets_with_sums_6_and_10_have_loss_4() -> None:
    task = run(Scripted(), [window(micro(6.0, 3), micro(10.0, 1))])
    assert task.norms == [4.0]
    assert task.weights == pytest.approx([1 - 0.01 * 4.0])
    assert task.train_metrics.compute()["loss"] == 4.0
    assert task.tokens == 4


def test_the_mean_of_the_micro_batches_means_would_be_6() -> None:
    def mean_of_means(self: Scripted, batches: list[dict[str, Tensor]], targets: int) -> list[Counts]:
        counted = [self.count(batch) for batch in batches]
        sum(c.loss / c.targets / len(batches) for c in counted).backward()
        return counted

    with patch.object(Scripted, "_accumulate", mean_of_means):
        assert run(Scripted(), [window(micro(6.0, 3), micro(10.0, 1))]).norms == [6.0]


def test_a_micro_batch_without_targets_changes_nothing() -> None:
    assert run(Scripted(), [window(micro(6.0, 3), micro(10.0, 1), micro(0.0, 0))]).norms == [4.0]
    assert run(Scripted(), [window(micro(0.0, 0))]).weights == [1.0]


@pytest.mark.parametrize(
    "bad",
    [micro(math.nan), micro(math.inf), micro(1.0, offset=math.inf), micro(1.0, offset=math.nan)],
    ids=["nan gradient", "inf gradient", "inf loss alone", "nan loss alone"],
)
def test_an_update_that_is_not_finite_is_skipped_and_counted(bad) -> None:
    task = run(Scripted(), [window(micro(1.0)), window(micro(1.0), bad), window(micro(1.0))])
    assert task.weights == pytest.approx([0.99, 0.99, 0.98])
    assert (task.global_step, task.skipped, task.failures, task.tokens) == (3, 1, 0, 4)
    assert task.train_metrics.compute()["loss"] == pytest.approx((1.0 + 0.99) / 2)


def test_too_many_in_a_row_end_the_run() -> None:
    task = Scripted(nonfinite_patience=3)
    bad, good = window(micro(math.nan)), window(micro(1.0))
    with pytest.raises(NonFinite, match="3 updates in a row, the last one 6"):
        run(task, [bad, bad, good, bad, bad, bad, good])
    assert task.skipped == 5
    assert run(Scripted(nonfinite_patience=3), [bad, bad, good, bad, bad, good]).skipped == 4


def test_a_scaler_that_still_searches_for_its_scale_is_no_failure() -> None:
    """float16 ends at 65504, so a gradient of 3 overflows at the first scales: 65536 and 32768."""
    task = Scripted(nonfinite_patience=2)
    task.compute = torch.float16
    run(task, [window(micro(3.0)) for _ in range(4)], scaler=True)
    assert (task.skipped, task.failures, task.norms[2:]) == (2, 0, [3.0, 3.0])
    assert task.weights == pytest.approx([1.0, 1.0, 0.97, 0.94])


class Rooted(Scripted):
    """The loss is finite, its gradient never is."""

    def count(self, batch: dict[str, Tensor]) -> Counts:
        counts = super().count(batch)
        return counts._replace(loss=counts.loss + (self.network.w - self.network.w).abs().sqrt().sum())


def test_what_no_scale_makes_finite_ends_the_run() -> None:
    """A gradient that is not finite is a failure once the scale is at its smallest, a loss that is not at once."""
    gradient, loss = Rooted(nonfinite_patience=2), Scripted(nonfinite_patience=2)
    with pytest.raises(NonFinite):
        run(gradient, [window(micro(1.0)) for _ in range(40)], scaler=True)
    assert gradient.skipped == 16 + 2
    with pytest.raises(NonFinite):
        run(loss, [window(micro(math.nan)) for _ in range(40)], scaler=True)
    assert loss.skipped == 2


def scaled_by_hand(slopes: list[float], clip: float) -> list[float]:
    """A weight of 1 after each update at rate 0.01, with the loss scaled, unscaled and clipped step by step."""
    weight, scale, weights = 1.0, 65536.0, []
    for slope in slopes:
        gradient = float(torch.tensor(scale).half() * torch.tensor(slope).half()) / scale
        if math.isfinite(gradient):
            weight -= 0.01 * gradient * min(1.0, clip / (abs(gradient) + 1e-6))
        else:
            scale /= 2
        weights.append(weight)
    return weights


def test_gradients_are_unscaled_before_they_are_measured_and_clipped() -> None:
    slopes = [3.0, 3.0, 3.0, 0.25, 2.0]
    task = Scripted(clip_norm=0.5)
    task.compute = torch.float16
    run(task, [window(micro(slope)) for slope in slopes], scaler=True)
    assert task.norms[2:] == [3.0, 0.25, 2.0]
    assert task.weights == pytest.approx(scaled_by_hand(slopes, 0.5), rel=1e-6)
    assert task.weights != pytest.approx(scaled_by_hand(slopes, 1e9), rel=1e-3)


def test_clipping_before_unscaling_would_be_noticed() -> None:
    slopes = [3.0, 3.0, 3.0, 0.25, 2.0]
    task = Scripted(clip_norm=0.5)
    task.compute = torch.float16
    clip, unscale = task._clip, ForwardPrecision.unscale

    def late() -> Tensor:
        norm = clip()
        unscale(task.precision, task.trainer.strategy.optimizers)
        return norm

    task._clip = late  # type: ignore[method-assign]
    with patch.object(ForwardPrecision, "unscale", lambda self, optimizers: None):
        run(task, [window(micro(slope)) for slope in slopes], scaler=True)
    assert task.weights != pytest.approx(scaled_by_hand(slopes, 0.5), rel=1e-3)


@pytest.mark.parametrize("limit", [0.5, 4.0, 100.0])
def test_clipping_is_torchs(limit) -> None:
    task = Scripted(clip_norm=limit)
    task.network = tiny_gpt(scale=5.0)
    task.network(random_ids(2, 8)).square().mean().backward()
    task.parallel = Parallel(task.network)
    parameters = list(task.network.parameters())
    before = [p.grad.clone() for p in parameters]
    norm = task._clip()
    ours = [p.grad.clone() for p in parameters]
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(parameters, limit)), rel=1e-6)
    assert all(torch.allclose(p.grad, mine, rtol=1e-6) for p, mine in zip(parameters, ours, strict=True))
    largest = torch.nn.utils.get_total_norm(ours)
    assert float(largest) == pytest.approx(min(limit, float(norm)), rel=1e-4)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e-6), (torch.float16, 6e4), (torch.bfloat16, 1.003)])
def test_the_norm_of_16_bit_gradients_is_that_of_float32_copies(dtype, size) -> None:
    task = Scripted(clip_norm=None)
    task.network = tiny_gpt().to(dtype)
    for p in task.network.parameters():
        p.grad = torch.full_like(p, size)
    task.parallel = Parallel(task.network)
    expected = torch.nn.utils.get_total_norm([p.grad.float() for p in task.network.parameters()])
    norm = task._clip()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    assert norm.item() != pytest.approx(
        float(torch.nn.utils.get_total_norm([p.grad for p in task.network.parameters()])), rel=1e-5
    )


def test_the_logged_norm_is_that_before_clipping() -> None:
    task = run(Scripted(clip_norm=1.0), [window(micro(4.0))])
    assert task.norms == [4.0]
    assert task.weights == pytest.approx([0.99])


def test_random_numbers_differ_by_step_micro_batch_and_seed_and_repeat() -> None:
    windows = [window(micro(1.0), micro(1.0)) for _ in range(3)]
    first = run(Scripted(), windows).draws
    assert len(set(first)) == 6
    torch.rand(17)  # what ran before plays no part
    assert run(Scripted(), windows).draws == first
    assert not set(run(Scripted(seed=1), windows).draws) & set(first)


def test_a_step_draws_the_same_wherever_the_run_began() -> None:
    task = run(Scripted(), [window(micro(1.0))] * 3)
    task._seed(3)
    assert torch.rand(()).item() == task.draws[2]
