"""The grid of ranks as process groups: a device mesh for what is cut, plain groups for what is passed on."""

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lmforge.config.layout import Layout, Place


class Mesh:
    """Process groups of a layout. Every rank builds it at the same point.

    Parameters lie on the dimensions `replicate`, `shard` and `tp`; the ranks of a context-parallel group share a copy
    of the weights too, so `shard` includes them.
    """

    def __init__(self, layout: Layout, device: str):
        self.layout, self.place = layout, layout.place(dist.get_rank())
        sizes = (layout.pp, layout.dp // layout.shard, layout.shard * layout.cp, layout.tp)
        self.grid = init_device_mesh(device, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))

    @property
    def data(self) -> DeviceMesh:
        """Of the ranks over which `fully_shard` cuts and averages; two-dimensional where there are copies."""
        copies = self.layout.dp > self.layout.shard
        return self.grid["replicate", "shard"] if copies else self.grid["shard"]

    def group(self, same: Callable[[Place], tuple[int, ...]]) -> dist.ProcessGroup:
        """The group of all ranks whose places agree with this one's in what `same` takes of them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world):
            groups.setdefault(same(self.layout.place(rank)), []).append(rank)
        mine, _ = dist.new_subgroups_by_enumeration(list(groups.values()))
        assert mine is not None
        return mine

    def context_group(self) -> dist.ProcessGroup:
        return self.group(lambda place: (place.pp, place.dp, place.tp))

    def ends_group(self) -> dist.ProcessGroup:
        """The first and the last stage of each pipeline together; the stages between, which have no use for it, too."""
        last = self.layout.pp - 1
        return self.group(lambda place: (place.pp in (0, last), place.dp, place.cp, place.tp))

    @property
    def speaks(self) -> bool:
        """Whether this rank stands for the data it reads, which others of its tp, cp and pp groups read as well."""
        return (self.place.tp, self.place.cp, self.place.pp) == (0, 0, 0)

    @property
    def writes(self) -> bool:
        """Whether this rank is the first of its pipeline stage."""
        return (self.place.tp, self.place.cp, self.place.dp) == (0, 0, 0)

    @property
    def reports(self) -> bool:
        """Whether what this rank counts in a micro-batch is counted by no other."""
        return self.place.tp == 0 and self.place.pp == self.layout.pp - 1
