"""Mixed precision without autocast: layers keep float32 weights and compute from low-precision copies of them.

The same thing FSDP2's policy does to gathered weights, so `bf16-mixed` means one thing under every strategy: the whole
forward pass, residual stream included, runs in the low dtype; gradients and updates are float32. On CPUs it also saves
autocast's dispatch.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmforge.config.errors import UsageError


class _Low(nn.Module):
    """A layer whose weights are cast where they are used; `dtype` is set by the class that `mix` makes."""

    dtype: ClassVar[torch.dtype]

    def low(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.dtype)


class _LowLinear(_Low, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype), self.low(self.bias))


class _LowEmbedding(_Low, nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).to(self.dtype)


class _LowRMSNorm(_Low, nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.dtype), self.normalized_shape, self.low(self.weight), self.eps)


class _LowLayerNorm(_Low, nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return F.layer_norm(x, self.normalized_shape, self.low(self.weight), self.low(self.bias), self.eps)


KINDS: dict[type[nn.Module], type[_Low]] = {
    nn.Linear: _LowLinear,
    nn.Embedding: _LowEmbedding,
    nn.RMSNorm: _LowRMSNorm,
    nn.LayerNorm: _LowLayerNorm,
}


def mix(network: nn.Module, dtype: torch.dtype) -> None:
    """Make every layer of `network` that has weights compute in `dtype`; the weights and their names stay.

    Raises UsageError naming a layer of a kind that is not known here.
    """
    classes = {kind: type(kind.__name__, (low,), {"dtype": dtype}) for kind, low in KINDS.items()}
    for name, module in network.named_modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
        elif any(True for _ in module.parameters(recurse=False)):
            known = ", ".join(kind.__name__ for kind in KINDS)
            raise UsageError(f"precision: {name} is a {type(module).__name__}; mixed precision is known for {known}")
