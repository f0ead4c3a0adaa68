"""Parallelism, recomputation and compilation applied to a plain network from outside, one function per kind."""

import hashlib
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmforge.config.layout import ALONE, Layout
from lmforge.parallel.mesh import Mesh
from lmforge.parallel.norm import local
from lmforge.parallel.parallel import Parallel, Replicated
from lmforge.parallel.pipeline import Piped
from lmforge.parallel.places import local_place
from lmforge.parallel.precision import ForwardPrecision
from lmforge.parallel.sharded import Sharded


@dataclass(frozen=True)
class Plan:
    """How the network is laid out: built on the meta device, cut, then filled parameter by parameter."""

    kind: str = "single"  # single | ddp | mesh
    layout: Layout = ALONE
    reshard_after_forward: bool = True  # mesh: drop gathered weights after the forward pass
    virtual_stages: int = 1  # mesh: stages that each pipeline rank holds
    activation_checkpointing: int = 0  # recompute every k-th block; 0 none
    compile_backend: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} ({self.layout})" if self.kind != "single" else self.kind

    def apply(
        self, network: nn.Module, precision: ForwardPrecision, device: torch.device, seed: int | None
    ) -> Parallel:
        """Change `network` in place (its parameter names stay) and return how to call it.

        `seed` fills the parameters; None leaves them unset for a checkpoint that is about to be read.
        """
        precision.apply(network, sharded=self.kind == "mesh")
        parallel = self._cut(network, precision, device) if self.kind == "mesh" else Parallel(network)
        blocks = [module for module in network.modules() if isinstance(module, network.block_class)]  # type: ignore[arg-type]
        recompute(blocks, self.activation_checkpointing)
        compile_blocks(blocks, self.compile_backend)
        if isinstance(parallel, Sharded):
            parallel.shard(blocks, precision, self.reshard_after_forward)
        network.to_empty(device=device)
        if seed is not None:
            initialise(network, seed)
        if self.kind == "ddp":
            return Replicated(network, device, dist.get_world_size())
        return parallel

    def _cut(self, network: nn.Module, precision: ForwardPrecision, device: torch.device) -> Sharded:
        mesh = Mesh(self.layout, device.type)
        if self.layout.pp > 1:
            parallel: Sharded = Piped(network, mesh, self.virtual_stages, precision.compute)
        else:
            parallel = Sharded(network, mesh)
        parallel.cut()
        return parallel


def recompute(blocks: list[nn.Module], every: int) -> None:
    """Activation checkpointing: drop the activations of every k-th block and compute them again in backward."""
    for block in blocks[every - 1 :: every] if every else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(blocks: list[nn.Module], backend: str | None) -> None:
    """Compile each block in place, so that state-dict names stay as they are and equal blocks share their code."""
    for block in blocks if backend else []:
        block.compile(backend=backend)


@torch.no_grad()
def initialise(network: nn.Module, seed: int) -> None:
    """Fill every parameter from (seed, its name): the same values for every layout, one whole tensor at a time."""
    for name, parameter in network.named_parameters():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = network.initial_value(name, parameter.shape, generator)  # type: ignore[operator]
        fill(parameter, whole)


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, equal on all ranks, into a parameter that may hold only a part of it; no communication."""
    place = local_place(parameter)
    local(parameter).copy_(whole[place] if place else whole)
