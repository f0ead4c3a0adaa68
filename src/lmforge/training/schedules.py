"""Learning-rate schedules: pure functions of the step, as a factor in [0, 1] of the peak rate.

`schedule(step, total)` is the factor for update number `step`, counted from 1 to `total`; beyond `total` it stays at
its last value. `warmup` is a share of the run when below 1, else a number of steps; its last step is at the peak, which
without a warm-up is the first step. `final` is a share of the peak, reached at `total`.
"""

import math
from dataclasses import dataclass


def _steps(amount: float, total: int) -> int:
    return round(amount * total if amount < 1 else amount)


@dataclass(frozen=True)
class Schedule:
    """Constant after a linear warm-up; the others differ in `shape` alone."""

    warmup: float = 0.0

    def __call__(self, step: int, total: int) -> float:
        step = min(step, total)
        warmup = min(max(_steps(self.warmup, total), 1), total)
        if step < warmup:
            return step / warmup
        return self.shape((step - warmup) / max(total - warmup, 1))

    def shape(self, progress: float) -> float:
        """Factor after the warm-up; `progress` runs from 0 to 1 and reaches 1 at the last step."""
        return 1.0


class Constant(Schedule):
    """The peak rate to the end."""


@dataclass(frozen=True)
class Linear(Schedule):
    final: float = 0.0

    def shape(self, progress: float) -> float:
        return 1.0 + (self.final - 1.0) * progress


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the peak to `final` (Loshchilov & Hutter 2017)."""

    final: float = 0.0

    def shape(self, progress: float) -> float:
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay: the last `decay` share of the steps after warm-up falls in a line to `final`."""

    final: float = 0.0
    decay: float = 0.4

    def shape(self, progress: float) -> float:
        if progress <= 1.0 - self.decay:
            return 1.0
        return self.final + (1.0 - self.final) * (1.0 - progress) / self.decay
