"""Gradients by their local parts, and the norm of one that is spread over a grid of ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def gradients_of(network: nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters() if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself where it is not cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wide(tensor: Tensor) -> bool:
    return tensor.dtype not in (torch.float16, torch.bfloat16)


def spread_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all ranks' gradients together, each value once: what several ranks hold alike is divided among
    them. Gradients of different meshes may be mixed. Every rank calls this."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, parts in _by_copies(gradients).items():
        norms = torch._foreach_norm(parts, 2, dtype=None if wide(parts[0]) else torch.float32)
        total += torch.stack(norms).double().square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt()


def _by_copies(gradients: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        if local(gradient).numel():
            found.setdefault(_copies(gradient), []).append(local(gradient))
    return found


def _copies(tensor: Tensor) -> int:
    """How many ranks of its mesh hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    return copies
