"""Is the model as sure as it is right? Expected calibration error of the next-token prediction."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lmforge.tasks.metrics import TokenScores


class Reliability(Metric):
    """Confidence against accuracy in bins of equal width, every target with the same weight.

    Guo et al. 2017, "On Calibration of Modern Neural Networks": a prediction's confidence is the probability of the
    most probable token; bin m of M holds confidences in ((m-1)/M, m/M]; the error is the mean over targets of
    |accuracy - confidence| of their bin. Sums are whole numbers and float64, so ranks and batches change nothing.
    """

    full_state_update = False

    targets: Tensor
    correct: Tensor
    confidence: Tensor

    def __init__(self, bins: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.bins = bins
        for name in ("targets", "correct"):
            self.add_state(name, torch.zeros(bins, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("confidence", torch.zeros(bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: TokenScores) -> None:
        confidence = scores.confidence.double()
        place = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        self.targets.index_add_(0, place, scores.counted.long())
        self.correct.index_add_(0, place, scores.correct.long())
        self.confidence.index_add_(0, place, torch.where(scores.counted, confidence, 0.0))

    def compute(self) -> dict[str, Any]:
        """`ece`, mean `confidence` and `accuracy`, and the `bins` that hold targets; nothing when none does."""
        rows = list(zip(self.targets.tolist(), self.correct.tolist(), self.confidence.tolist(), strict=True))
        total = sum(targets for targets, _, _ in rows)
        if total == 0:
            return {}
        return {
            "ece": sum(abs(correct - confidence) for _, correct, confidence in rows) / total,
            "confidence": sum(confidence for _, _, confidence in rows) / total,
            "accuracy": sum(correct for _, correct, _ in rows) / total,
            "bins": [self._bin(number, *row) for number, row in enumerate(rows) if row[0]],
        }

    def _bin(self, number: int, targets: int, correct: int, confidence: float) -> dict[str, Any]:
        return {
            "above": number / self.bins,
            "to": (number + 1) / self.bins,
            "targets": targets,
            "confidence": confidence / targets,
            "accuracy": correct / targets,
        }
