"""Mistakes that a layout could hold. Each is a plain function, so that it reaches the ranks by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from lmforge.parallel import norm, tensor
from lmforge.parallel.context import ContextTeam
from lmforge.parallel.exchange import Team
from lmforge.parallel.mesh import Mesh
from lmforge.parallel.pipeline import Piped
from lmforge.tasks.causal_lm import CausalLM


def norms_see_their_positions_alone() -> None:
    """The gradients of norms are not summed over the ranks that share the sequence."""
    tensor._Part._summand = lambda self: Replicate()  # type: ignore[method-assign]


def heads_norms_see_their_heads_alone() -> None:
    tensor._Heads._summand = lambda self: Replicate()  # type: ignore[method-assign]


def copies_count_twice() -> None:
    """What several ranks hold alike is counted by each in the norm, which is logged and clips."""
    norm._copies = lambda gradient: 1


def keys_keep_their_own_gradient() -> None:
    """Each rank keeps its own gradient of its keys and values, not everyone's."""
    Team.gather = Team.collect  # type: ignore[method-assign]


def positions_start_again() -> None:
    """Every rank takes the positions that it holds for the first ones."""
    share = ContextTeam.share

    def shared(self: ContextTeam, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = share(self, batch)
        return mine | {"positions": batch["positions"][:, : mine["positions"].shape[1]]}

    ContextTeam.share = shared  # type: ignore[method-assign]


def everyone_speaks() -> None:
    """Ranks that read the same targets all count them."""
    Mesh.speaks = property(lambda self: True)  # type: ignore[assignment, method-assign]


def ends_keep_their_own_gradient() -> None:
    """The tied embedding's gradient is not summed over the two ends of the pipeline."""
    Piped._shared_table = lambda self: None  # type: ignore[method-assign]


def both_ends_count() -> None:
    """Both ends count the tied embedding's gradient in the norm."""

    def owns(self: Any, name: str) -> bool:
        return True

    Piped.owns = owns  # type: ignore[method-assign]


def no_mask() -> None:
    _change_batch(lambda batch: batch | {"doc_ids": torch.zeros_like(batch["doc_ids"])})


def swapped_mask() -> None:
    _change_batch(lambda batch: batch | {"doc_ids": batch["doc_ids"].flip(0)})


def _change_batch(change: Callable[[Any], Any]) -> None:
    count = CausalLM.count
    CausalLM.count = lambda task, batch: count(task, change(batch))  # type: ignore[method-assign]
