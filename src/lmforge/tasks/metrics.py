"""Token-weighted metrics with exact counts over any number of ranks, updated without waiting for the device."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class Counts(NamedTuple):
    """Sums over the target tokens of some batches; tensors stay on their device."""

    loss: Tensor  # nats
    targets: Tensor
    correct: Tensor | None = None  # most probable token was the target; None where nobody asks
    bytes: Tensor | None = None  # UTF-8 bytes the targets stand for


class TokenScores(NamedTuple):
    """What each place of a micro-batch adds to the sums, `[n]`; where `counted` is False there is no target."""

    loss: Tensor  # nats, float64, 0 where there is no target
    counted: Tensor  # bool
    correct: Tensor  # bool
    bytes: Tensor  # int64
    confidence: Tensor  # probability of the most probable token, float32 or wider


class TokenMetrics(Metric):
    """Loss, perplexity, accuracy and bits per byte over all targets seen, each target counted once.

    Bits per byte is the loss of every target, end marks included, in bits, over the UTF-8 bytes of the same text;
    it does not depend on the tokenizer. Values are NaN-free floats only when something was counted.
    """

    full_state_update = False

    loss: Tensor
    targets: Tensor
    correct: Tensor
    bytes: Tensor

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("targets", "correct", "bytes"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, counts: Counts) -> None:
        self.loss.add_(counts.loss)  # in place: every assignment to a module's attribute costs more than the sum
        self.targets.add_(counts.targets)
        if counts.correct is not None:
            self.correct.add_(counts.correct)
        if counts.bytes is not None:
            self.bytes.add_(counts.bytes)

    def add(self, counted: Iterable[Counts]) -> None:
        """Update with each, which may be none because other ranks have the numbers."""
        for counts in counted:
            self.update(counts)
        count_as_updated(self)

    def compute(self) -> dict[str, float]:
        return ratios(float(self.loss), int(self.targets), int(self.correct), int(self.bytes))


def count_as_updated(metric: Metric) -> None:
    """Also where nothing was counted, since other ranks have the numbers: to compute a metric is a collective, and
    torchmetrics warns of one that was never updated."""
    metric._update_count = max(metric._update_count, 1)


def ratios(nats: float, targets: int, correct: int, size: int) -> dict[str, float]:
    """Sums -> loss, perplexity, accuracy and, where the bytes are known, bits per byte; nothing of no target."""
    if targets == 0:
        return {}
    loss = nats / targets
    values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": correct / targets}
    return values | ({"bits_per_byte": nats / math.log(2) / size} if size else {})
