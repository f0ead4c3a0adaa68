"""Ranks that train apart and meet every few steps (post-local SGD, Lin et al. 2020; DiLoCo, Douillard et al. 2023)."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lmforge.parallel.memory import Memory
from lmforge.parallel.parallel import Parallel
from lmforge.parallel.precision import ForwardPrecision
from lmforge.parallel.traffic import Traffic, gradient_bytes, size


class Rounds:
    """The outer optimizer: SGD with Nesterov momentum on how far the ranks have moved, on average, in a round.

    All ranks have the same weights where a round begins and ends. `outer_lr=1 outer_momentum=0` averages the weights.
    """

    def __init__(self, network: nn.Module, every: int, outer_lr: float, outer_momentum: float):
        self.every, self.lr, self.momentum = every, outer_lr, outer_momentum
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.began: Tensor | None = None  # the weights of the round's begin, all in one row
        momenta = torch.zeros_like(self._weights())
        self.momenta = momenta
        parts = momenta.split([p.numel() for p in self.parameters])
        named = zip(trained.items(), parts, strict=True)
        self.memory = Memory(shared={f"local_sgd/momentum/{name}": part.view_as(p) for (name, p), part in named})
        self.traffic = Traffic(gradient_bytes(network))

    def begin(self) -> None:
        """To be called before each update; the first of a round notes where it begins."""
        if self.began is None:
            self.began = self._weights()

    @torch.no_grad()
    def meet(self) -> None:
        """The outer step. A collective: it waits for all ranks."""
        assert self.began is not None
        moved = self.began - self._weights()
        dist.all_reduce(moved.div_(dist.get_world_size()))
        self.momenta.mul_(self.momentum).add_(moved)
        weights = self.began.sub_(moved.add_(self.momenta, alpha=self.momentum), alpha=self.lr)
        for p, part in zip(self.parameters, weights.split([p.numel() for p in self.parameters]), strict=True):
            p.copy_(part.view_as(p))
        self.began = None
        self.traffic.calls += 1
        self.traffic.sent = size([moved]) / self.every

    def _weights(self) -> Tensor:
        """A copy of all weights in one row, in float32 or wider."""
        row = torch.cat([p.detach().flatten() for p in self.parameters])
        return row if row.dtype == torch.float64 else row.float()


class Apart(Parallel):
    """A copy of the network that trains on this rank's gradients alone until the ranks meet."""

    def __init__(self, network: nn.Module, rounds: Rounds):
        super().__init__(network)
        self.writes = dist.get_rank() == 0
        self.rounds, self.memory, self.traffic = rounds, rounds.memory, rounds.traffic

    def update(self, precision: ForwardPrecision, optimizers: list[Optimizer], finite: bool) -> None:
        self.rounds.begin()
        super().update(precision, optimizers, finite)
