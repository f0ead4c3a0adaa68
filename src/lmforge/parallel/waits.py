"""How long a rank has waited for others inside the collectives of a sharded network."""

import time
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter


class Waits:
    """Seconds spent in FSDP2's collectives since `watch`. On the host, hence on CPUs only: a GPU's collectives return
    before they have happened."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, network: nn.Module) -> None:
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_AllGather(self))
                module.set_custom_reduce_scatter(_ReduceScatter(self))


class _Timed:
    """A collective that adds its seconds up."""

    def __init__(self, waits: Waits):
        self.waits = waits

    def __call__(self, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        work = super().__call__(*args, **options)  # type: ignore[misc]
        self.waits.seconds += time.perf_counter() - began
        return work


class _AllGather(_Timed, DefaultAllGather):
    """The gathering of weights."""


class _ReduceScatter(_Timed, DefaultReduceScatter):
    """The averaging of gradients."""
