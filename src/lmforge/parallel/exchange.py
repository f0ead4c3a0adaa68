"""Differentiable collectives: what goes one way in the forward pass comes back the opposite way in the backward pass.

torch's own `distributed.nn.functional.all_gather` gives wrong gradients on gloo when they come in not contiguous.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Step = Callable[[Tensor], Tensor]

# torch 2.13 has new names for these and warns of the old ones
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Team:
    """The ranks of one process group, and this one's number in it."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Everyone's `x` one after the other along `dim`; backward sums everyone's gradient of one's own part."""
        return _Exchange.apply(x, lambda t: self._gather(t, dim), lambda g: self._scatter(g, dim))

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """One's own part along `dim` of the sum of everyone's `x`; backward is `gather`'s forward."""
        return _Exchange.apply(x, lambda t: self._scatter(t, dim), lambda g: self._gather(g, dim))

    def collect(self, x: Tensor, dim: int) -> Tensor:
        """As `gather`, where everyone goes on to compute the same: backward keeps one's own part of the gradient."""
        return _Exchange.apply(x, lambda t: self._gather(t, dim), lambda g: self.own(g, dim))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of everyone's `x`, from which everyone goes on to compute the same."""
        return _Exchange.apply(x, self._sum, lambda g: g)

    def copy(self, x: Tensor) -> Tensor:
        """`x`, which everyone has, for different uses: backward sums everyone's gradient."""
        return _Exchange.apply(x, lambda t: t.view_as(t), self._sum)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """One's own part of `x` along `dim`."""
        return x.chunk(self.size, dim)[self.rank]

    def _gather(self, x: Tensor, dim: int) -> Tensor:
        part = x.movedim(dim, 0).contiguous()
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        gather_into(whole, part, group=self.group)
        return whole.movedim(0, dim).contiguous()

    def _scatter(self, x: Tensor, dim: int) -> Tensor:
        whole = x.movedim(dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        scatter_into(part, whole, group=self.group)
        return part.movedim(0, dim).contiguous()

    def _sum(self, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Step, back: Step) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None
