"""Precision from outside the network: dtype of weights, compute and gradient reduction, and the fp16 loss scaler."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lmforge.parallel.mixed import mix

SMALLEST_SCALE = 1.0  # below it a loss that is scaled would be a loss made smaller


class ForwardPrecision(Precision):
    """Lightning's precision plugin without autocast: the network itself computes in the compute dtype.

    The stock plugin wraps the whole training step, so the optimizer would run under autocast too, and swaps fp16 for
    bf16 on CPU. Here `16-mixed` is real fp16 with a `GradScaler` on every device.
    """

    def __init__(self, word: str, weights: str, compute: str, reduce: str, scaler: bool, device: str):
        super().__init__()
        self.precision = word  # type: ignore[assignment]
        self.weights, self.compute, self.reduce = (getattr(torch, name) for name in (weights, compute, reduce))
        self.device = device
        self.scaler = torch.amp.GradScaler(device, enabled=scaler)

    def apply(self, network: nn.Module, sharded: bool) -> None:
        """Weights in their dtype, layers computing in theirs; metrics beside the network keep their own.

        Where the weights are sharded, `sharded_policy` casts them as they are gathered.
        """
        network.to(self.weights)
        if self.compute != self.weights and not sharded:
            mix(network, self.compute)

    def sharded_policy(self) -> MixedPrecisionPolicy:
        """The same dtypes for `fully_shard`: parameters are gathered in the compute dtype."""
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)

    def scaled(self, loss: Tensor) -> Tensor:
        """In fp16 times the scale, else as it is."""
        return self.scaler.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Gradients back in their own unit, before they are measured or clipped."""
        if self.scaler.is_enabled():
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)

    @property
    def searches(self) -> bool:
        """Whether a gradient that is not finite may only mean that the fp16 scale is too large still."""
        return self.scaler.is_enabled() and self.scaler.get_scale() > SMALLEST_SCALE

    def step(self, optimizers: Iterable[Optimizer], finite: bool) -> None:
        """Apply the update unless a gradient is not finite, and adapt the fp16 scale to that."""
        for optimizer in optimizers if finite else ():
            optimizer.step()
        if self.scaler.is_enabled():
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)

    def describe(self) -> str:
        """The dtypes in words, for the head of a run."""
        names = (str(dtype).removeprefix("torch.") for dtype in (self.weights, self.compute, self.reduce))
        return "weights {}, compute {}, gradient reduction {}".format(*names)
