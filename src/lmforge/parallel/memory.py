"""What a strategy remembers from update to update."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Memory:
    """Tensors by name that later updates depend on: a checkpoint holds them, and a resume fills them in place.

    `own` differ from rank to rank: their mean is what counts, and what every rank goes on with when the number of ranks
    has changed. `shared` are equal on all.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
