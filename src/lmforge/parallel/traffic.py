"""What the exchange of gradients or weights costs."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass
class Traffic:
    """Bytes that one rank hands to all-reduces; a ring sends and receives about twice that.

    `plain`: the gradients of one update as they are. `sent`: what the last update took instead; its share of a round,
    where not every update sends. `calls`: of the exchange, since the process began.
    """

    plain: int
    sent: float = 0.0
    calls: int = 0


def gradient_bytes(network: nn.Module) -> int:
    return size(p for p in network.parameters() if p.requires_grad)


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
