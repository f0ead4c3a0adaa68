"""How the ranks of a run stand to each other: a grid of pipeline stages x data x context x tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from lmforge.config.errors import UsageError

DIMENSIONS = ("dp", "tp", "pp", "cp")


class Place(NamedTuple):
    """A rank's coordinates in the layout."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the grid, whose last dimension changes fastest: pp x dp x cp x tp.

    Ranks of one tp group talk most and are neighbours; pipeline stages talk least and are furthest apart. `shard` of
    the dp ranks share one copy of the weights, so there are dp / shard copies.
    """

    dp: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def place(self, rank: int) -> Place:
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Place(pp, dp, cp, tp)

    def reader(self, dp: int) -> int:
        """The first rank that reads share `dp` of the data."""
        return dp * self.cp * self.tp

    def __str__(self) -> str:
        """`dp 4 (2 copies of weights cut in 2) x tp 2`; what is one is left out."""
        copies = f" ({self.dp // self.shard} copies of weights cut in {self.shard})" if 1 < self.shard < self.dp else ""
        sizes = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        return " x ".join(f"{name} {size}{copies if name == 'dp' else ''}" for name, size in sizes.items() if size > 1)


ALONE = Layout()


def read_layout(strategy: Mapping[str, Any], devices: int, nodes: int) -> Layout:
    """The layout that a strategy's keys mean on so many devices. Raises UsageError naming the numbers that do not fit.

    A single process is a layout of ones, whatever the keys say.
    """
    world = devices * nodes
    if world == 1 or strategy["kind"] != "mesh":
        return Layout(dp=world)
    sizes = {name: strategy[name] for name in DIMENSIONS}
    others = prod(size for size in sizes.values() if size != "auto")
    if world % others or (sizes["dp"] != "auto" and others != world):
        raise UsageError(_misfit(sizes, others, world, devices, nodes))
    sizes["dp"] = world // others if sizes["dp"] == "auto" else sizes["dp"]
    return Layout(shard=_shard(strategy["shard"], sizes, devices), **sizes)


def _misfit(sizes: Mapping[str, Any], others: int, world: int, devices: int, nodes: int) -> str:
    named = [name for name, size in sizes.items() if size not in ("auto", 1)] or ["dp"]
    product = " x ".join(f"strategy.{name} {sizes[name]}" for name in named) + f" = {others}"
    product = product if len(named) > 1 else f"strategy.{named[0]}={others}"
    relation = "is not the" if sizes["dp"] != "auto" else "does not divide the"
    across = f"{devices} devices" + (f" x {nodes} nodes" if nodes > 1 else "")
    return f"{product} {relation} {world} processes ({across}); trainer.devices={-(-others // nodes)} would fit"


def _shard(word: int | str, sizes: Mapping[str, int], devices: int) -> int:
    """Data-parallel ranks that share a copy of the weights: `all`, those of a `node`, or as many as the number says."""
    dp = sizes["dp"]
    inside = max(1, devices // (sizes["tp"] * sizes["cp"]))
    shard = {"all": dp, "node": min(dp, inside)}.get(str(word), word)
    if dp % int(shard):
        near = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        raise UsageError(f"strategy.shard={word}: {shard} does not divide the {dp} data-parallel ranks; near: {near}")
    return int(shard)
