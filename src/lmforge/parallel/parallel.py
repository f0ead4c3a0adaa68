"""A network as the training step sees it, whatever lies behind: one process, copies, cuts, or a pipeline."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lmforge.parallel.norm import gradients_of, local, wide
from lmforge.parallel.precision import ForwardPrecision

Batch = dict[str, Tensor]


class Objective(Protocol):
    """What the training step says of its loss. `Counts` are sums over targets, of which `loss` carries the gradient."""

    micro_batch: int  # the one that is computed, counted from 1 in its update

    def count(self, batch: Batch) -> Any:
        """The counts of one micro-batch."""

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the network takes of it: ids, document numbers, positions."""

    def measure(self, hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor) -> Any:
        """Counts from the last hidden state."""

    def weighed(self, counts: Any) -> Tensor:
        """The loss whose gradient is this rank's part of the update's."""


class Parallel:
    """One process; variants say what they do otherwise."""

    size = 1  # ranks over which gradients are averaged
    speaks = True  # this rank stands for the data it reads: no other that reads the same does
    reports = True  # what this rank counts in a micro-batch is counted by no other
    writes = True  # this rank saves what is not cut

    def __init__(self, network: nn.Module):
        self.network = network
        self.forward: Callable[..., Any] = network  # for a micro-batch of training or validation
        self.infer: Callable[..., Tensor] = network  # ids and a cache to logits, the same on every rank
        self.names = [name for name, _ in network.named_parameters()]  # of the whole network, whatever is held here

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch; gradients meet those of other ranks in the window's last one."""
        return nullcontext()

    def share(self, batch: Batch) -> Batch:
        """What this rank computes of a micro-batch that it has read."""
        return batch

    def window(self, micro_batches: list[Batch], objective: Objective) -> list[Any]:
        """Forward and backward passes of an update; the counts of those micro-batches that end on this rank."""
        counted = []
        for objective.micro_batch, batch in enumerate(micro_batches, 1):
            with self.sync(objective.micro_batch == len(micro_batches)):
                counts = objective.count(batch)
                objective.weighed(counts).backward()
            counted.append(counts._replace(loss=counts.loss.detach()))
        return counted

    def score(self, batch: Batch, objective: Objective) -> Any | None:
        """Counts of a micro-batch without a backward pass; None where it ends on another rank."""
        return objective.count(batch)

    def norm(self) -> Tensor:
        """The 2-norm of the whole gradient; of 16-bit ones in float32, where squares neither vanish nor overflow."""
        gradients = gradients_of(self.network)
        if all(wide(g) for g in gradients):
            return get_total_norm(gradients)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip(self, norm: Tensor, most: float) -> None:
        """Scale gradients whose norm is `norm` so that it is at most `most`."""
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(g) for g in gradients_of(self.network)], factor)

    def update(self, precision: ForwardPrecision, optimizers: list[Optimizer], finite: bool) -> None:
        """Change the weights, unless a gradient is not finite, and drop the gradients."""
        precision.step(optimizers, finite)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def owns(self, name: str) -> bool:
        """Whether a parameter that is held here is counted and saved here as well."""
        return True

    def settle(self) -> None:
        """Back to the layout that the optimizer knows, after forward passes without a backward pass."""


class Replicated(Parallel):
    """DDP: one copy a rank, gradients averaged in buckets while backward still runs."""

    def __init__(self, network: nn.Module, device: torch.device, world: int):
        super().__init__(network)
        self.size, self.writes = world, dist.get_rank() == 0
        self.replica = self.forward = DistributedDataParallel(
            network,
            device_ids=None if device.type == "cpu" else [device.index],
            gradient_as_bucket_view=True,
        )

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.replica.no_sync()
