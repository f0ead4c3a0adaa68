"""FSDP2 over a grid of ranks: parameters, gradients and optimizer state cut block by block."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lmforge.parallel.context import ContextTeam, split_sequences
from lmforge.parallel.mesh import Mesh
from lmforge.parallel.norm import gradients_of, spread_norm
from lmforge.parallel.parallel import Batch, Parallel
from lmforge.parallel.precision import ForwardPrecision
from lmforge.parallel.tensor import split_matrices


class Sharded(Parallel):
    """Each rank holds a cut of the weights, gathers a block's when it runs, and averages gradients with the others that
    read or see other data: those of its dp and cp groups."""

    def __init__(self, network: nn.Module, mesh: Mesh):
        super().__init__(network)
        self.mesh = mesh
        self.size = mesh.layout.dp * mesh.layout.cp
        self.speaks, self.reports, self.writes = mesh.speaks, mesh.reports, mesh.writes
        self.context = ContextTeam(mesh.context_group()) if mesh.layout.cp > 1 else None

    def cut(self) -> None:
        """Tensor and context parallelism, before anything is compiled or gathers whole blocks."""
        if self.mesh.layout.tp > 1:
            split_matrices(self.network, self.mesh.grid["tp"])
        if self.context is not None:
            split_sequences(self.network, self.context)

    def shard(self, blocks: list[nn.Module], precision: ForwardPrecision, reshard: bool) -> None:
        mesh, policy = self.mesh.data, precision.sharded_policy()
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(self.network, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        self.network.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def share(self, batch: Batch) -> Batch:
        return batch if self.context is None else self.context.share(batch)

    def norm(self) -> Tensor:
        return spread_norm(gradients_of(self.network), next(self.network.parameters()).device)

    def settle(self) -> None:
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
