"""Parallelism, recomputation and compilation applied to a plain network from outside, one function per kind."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lmforge.parallel.precision import ForwardPrecision


@dataclass
class Parallel:
    """What a training step needs to know of a network that has been made parallel."""

    forward: Callable[..., Tensor]
    sync: Callable[[bool], AbstractContextManager[Any]]  # sync(last micro-batch of the window?)
    size: int  # ranks over which gradients are averaged
    settle: Callable[[], None] = lambda: None  # back to the layout the optimizer knows, after forwards without backward


@dataclass(frozen=True)
class Plan:
    """How the network is laid out: built on the meta device, cut, then filled parameter by parameter."""

    kind: str  # single | ddp | fsdp
    reshard_after_forward: bool = True  # fsdp: drop gathered weights after the forward pass
    activation_checkpointing: int = 0  # recompute every k-th block; 0 none
    compile_backend: str | None = None

    def apply(
        self, network: nn.Module, precision: ForwardPrecision, device: torch.device, seed: int | None
    ) -> Parallel:
        """Change `network` in place (its parameter names stay) and return how to call it.

        `seed` fills the parameters; None leaves them unset for a checkpoint that is about to be read.
        """
        blocks = [module for module in network.modules() if isinstance(module, network.block_class)]  # type: ignore[arg-type]
        recompute(blocks, self.activation_checkpointing)
        compile_blocks(blocks, self.compile_backend)
        precision.apply(network, sharded=self.kind == "fsdp")
        if self.kind == "fsdp":
            shard(network, blocks, precision, device.type, self.reshard_after_forward)
        network.to_empty(device=device)
        if seed is not None:
            initialise(network, seed)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.kind == "fsdp":
            return Parallel(network, partial(_sharded_sync, network), world, partial(_reshard, network))
        if self.kind == "ddp" and world > 1:
            replica = replicate(network, device)
            return Parallel(replica, lambda last: nullcontext() if last else replica.no_sync(), world)
        return Parallel(network, lambda last: nullcontext(), 1)


def recompute(blocks: list[nn.Module], every: int) -> None:
    """Activation checkpointing: drop the activations of every k-th block and compute them again in backward."""
    for block in blocks[every - 1 :: every] if every else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(blocks: list[nn.Module], backend: str | None) -> None:
    """Compile each block in place, so that state-dict names stay as they are and equal blocks share their code."""
    for block in blocks if backend else []:
        block.compile(backend=backend)


def shard(network: nn.Module, blocks: list[nn.Module], precision: ForwardPrecision, device: str, reshard: bool) -> None:
    """FSDP2 (`fully_shard`): parameters, gradients and optimizer state cut over all ranks, block by block."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = precision.sharded_policy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _sharded_sync(network: nn.Module, last: bool) -> AbstractContextManager[Any]:
    network.set_requires_gradient_sync(last)  # type: ignore[operator]
    return nullcontext()


def _reshard(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def replicate(network: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP: one copy a rank, gradients averaged in buckets while backward still runs."""
    return DistributedDataParallel(
        network,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,
    )


@torch.no_grad()
def initialise(network: nn.Module, seed: int) -> None:
    """Fill every parameter from (seed, its name): the same values for every layout, one whole tensor at a time."""
    for name, parameter in network.named_parameters():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = network.initial_value(name, parameter.shape, generator)  # type: ignore[operator]
        fill(parameter, whole)


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, equal on all ranks, into a parameter that may hold only its shard; no communication."""
    if isinstance(parameter, DTensor):
        whole = whole.to(device=parameter.device, dtype=parameter.dtype)
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
