"""CPU time and memory of a run's processes."""

import resource
import sys
from dataclasses import dataclass

import torch

from lmforge.parallel.control import Control


def cpu_seconds(children: bool = True) -> float:
    """CPU time of this process, all threads, since its start, and of the children it has waited for."""
    whose = (resource.RUSAGE_SELF, *([resource.RUSAGE_CHILDREN] if children else []))
    used = [resource.getrusage(who) for who in whose]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: on its GPU when it computes on one, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Resources:
    """What all ranks had used when they were last together; rank 0 alone goes on from there."""

    memory: int  # bytes, of the rank that held most
    cpu: float  # seconds, all ranks together
    mine: float  # of these this rank's
    alone: bool  # no other rank, so every child is this run's loader and not a rank that was counted already

    @classmethod
    def gather(cls, control: Control, device: torch.device) -> "Resources":
        """Every rank calls this at the same point."""
        alone = control.world == 1
        cpu = sum(control.gather(round(1e6 * cpu_seconds()))) / 1e6
        return cls(max(control.gather(peak_memory_bytes(device))), cpu, cpu_seconds(alone), alone)

    def cpu_now(self) -> float:
        """CPU seconds of all ranks together, with what this one has used since."""
        return self.cpu + cpu_seconds(self.alone) - self.mine
