"""What Lightning does at every step for programs of any kind and this one has no use for, taken out."""

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler


class Unprofiled(PassThroughProfiler):
    """Lightning enters its profiler's context some 25 times a step; this one's is made once."""

    NOTHING: ClassVar = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self.NOTHING


def lean_steps(trainer: pl.Trainer) -> None:
    """Lightning asks for the signature of `training_step` at every step; it takes a window and its number."""
    trainer.fit_loop.epoch_loop._build_kwargs = (  # type: ignore[method-assign]
        lambda kwargs, batch, batch_idx: OrderedDict(batch=batch, batch_idx=batch_idx)
    )
