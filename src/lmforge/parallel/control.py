"""What the ranks tell each other on the host: one small all-reduce a step, and objects from rank 0."""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Agreed(NamedTuple):
    """Sums over all ranks of what each brought to the step."""

    targets: int
    terminate: int = 0  # ranks that were told to end
    requeue: int = 0  # ranks that were told to make room and come back
    failed: int = 0  # ranks whose checkpoint could not be written

    @property
    def stops(self) -> bool:
        return self.terminate + self.requeue > 0


class Control:
    """A gloo group of its own, so that agreeing needs no accelerator and never meets the gradients' collectives."""

    def __init__(self) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.group = dist.new_group(backend="gloo") if self.world > 1 else None
        self.waited = 0.0  # seconds in all that this rank has waited for the others here

    def agree(self, mine: Agreed) -> Agreed:
        """Sum what each rank brings; every rank must call this at the same point of the same step."""
        if self.group is None:
            return mine
        return Agreed(*self._sum(torch.tensor(mine, dtype=torch.int64)))

    def any(self, verdict: bool | int) -> bool:
        """Whether any rank says so."""
        return sum(self.gather(int(verdict))) > 0

    def gather(self, number: int) -> list[int]:
        """Every rank's number, in order of rank."""
        if self.group is None:
            return [number]
        numbers = torch.zeros(self.world, dtype=torch.int64)
        numbers[self.rank] = number
        return self._sum(numbers)

    def _sum(self, numbers: torch.Tensor) -> list[int]:
        began = time.perf_counter()
        dist.all_reduce(numbers, group=self.group)
        self.waited += time.perf_counter() - began
        return numbers.tolist()

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def share_object(value: Any) -> Any:
    """Rank 0's `value` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
