"""What the ways in which replicas exchange gradients or weights have in common: what they send, what they remember."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Traffic:
    """Bytes that one rank hands to all-reduces; a ring sends and receives about twice that.

    `plain`: the gradients of one update as they are. `sent`: what the last update really took of them, on average where
    not every update sends. `calls`: how often the exchange was called since the process began.
    """

    plain: int
    sent: float = 0.0
    calls: int = 0


@dataclass
class Memory:
    """Tensors that later updates depend on, by name, so that a checkpoint must hold them and a resume fills them.

    `own` differ from rank to rank; `shared` are equal on all.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
