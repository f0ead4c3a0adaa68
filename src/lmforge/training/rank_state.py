"""What a checkpoint holds for one rank alone: its metric sums, what its strategy remembers, its own optimizer state.

train/<metric>                 a sum since the last row of the log
powersgd/..., local_sgd/...    a tensor of `Memory`; one that all ranks share stands in rank 0's file alone
optimizer/<parameter>/<slot>   of a rank other than 0 that trains apart; rank 0's is where all others read
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmforge.parallel.local_sgd import Apart
from lmforge.parallel.memory import Memory
from lmforge.parallel.parallel import Parallel
from lmforge.tasks.metrics import TokenMetrics, count_as_updated
from lmforge.training.checkpoint import Checkpoint, Piece, PieceReader
from lmforge.training.saving import optimizer_tensors
from lmforge.training.weights import some

MEMORIES = ("powersgd/", "local_sgd/", "optimizer/")  # what may stand in a file beside the sums


def local_pieces(metrics: TokenMetrics, parallel: Parallel, optimizers: list[Optimizer]) -> dict[str, Piece]:
    tensors: dict[str, Tensor] = {f"train/{name}": getattr(metrics, name) for name in metrics._defaults}
    tensors |= parallel.memory.own
    if parallel.writes:
        tensors |= parallel.memory.shared
    elif isinstance(parallel, Apart):
        tensors |= {f"optimizer/{name}": value for name, _, value in optimizer_tensors(parallel, optimizers)}
    return {name: Piece(value.detach(), (0,) * value.dim(), tuple(value.shape)) for name, value in tensors.items()}


class RankState:
    """The ranks' files of a checkpoint, which may come from a stranger, as rank `rank` of `world` goes on from them.

    On as many ranks as before each goes on with its own. On another number rank 0 takes the sum of all metric sums, the
    others start at zero; what a strategy remembers of each rank becomes its mean, on every rank.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int):
        self.checkpoint, self.rank = checkpoint, rank
        self.ranks: int = checkpoint.state["world_size"]
        self.same = self.ranks == world

    def reader(self, rank: int) -> PieceReader:
        file = f"local-{rank:05d}.safetensors"
        if file not in self.checkpoint.files:
            raise self.checkpoint.broken(f"state.json does not name {file}")
        reader = PieceReader([self.checkpoint.folder / file])
        unknown = [name for name in reader.names() if not name.startswith(("train/", *MEMORIES))]
        sums = reader.below("train/")
        unknown += [name for name in sums.names() if name not in TokenMetrics()._defaults or sums.shapes[name]]
        if unknown:
            raise self.checkpoint.broken(f"{file}: {some(unknown)} is nothing that this version keeps for a rank")
        return reader

    @cached_property
    def mine(self) -> list[PieceReader]:
        """What this rank goes on from: its own file, or all."""
        return [self.reader(rank) for rank in ([self.rank] if self.same else range(self.ranks))]

    def optimizer(self, parallel: Parallel) -> PieceReader:
        """This rank's own state where ranks trained apart and go on so, else the one that all may read."""
        own = self.mine[0].below("optimizer/")
        return own if isinstance(parallel, Apart) and self.same and own.shapes else self.checkpoint.reader("optimizer")

    def load(self, metrics: TokenMetrics, parallel: Parallel, report: Callable[[str], None]) -> None:
        """Fill the sums and the strategy's memory; `report` what could not go on as it was."""
        for reader in self.mine if self.same or self.rank == 0 else []:
            sums = reader.below("train/")
            for name in sums.names():
                current = getattr(metrics, name)
                setattr(metrics, name, current + sums.read(name).to(current.device))
        count_as_updated(metrics)
        self._remember(parallel.memory, report)
        trained_apart = self.ranks > 1 and self.reader(1).below("optimizer/").shapes
        if trained_apart and not (isinstance(parallel, Apart) and self.same):
            report("strategy    ranks trained apart: all go on with the optimizer state of rank 0")

    @torch.no_grad()
    def _remember(self, memory: Memory, report: Callable[[str], None]) -> None:
        first = self.reader(0)
        new = [name for name, tensor in memory.shared.items() if not _mean([first], name, tensor)]
        new += [name for name, tensor in memory.own.items() if not _mean(self.mine, name, tensor)]
        wanted = {name.split("/")[0] for name in (*memory.shared, *memory.own)}
        held = {name.split("/")[0] for name in first.names()} - {"train", "optimizer"}
        if new:
            report(f"strategy    its memory, from {new[0]} on, is not in the checkpoint in this shape and starts anew")
        elif memory.own and not self.same:
            report(f"strategy    every rank goes on with the mean of what the {self.ranks} ranks remembered")
        if left := ", ".join(sorted(held - wanted)):
            report(f"strategy    what {left} remembered is left out")


def _mean(readers: list[PieceReader], name: str, tensor: Tensor) -> bool:
    """Fill a tensor with the mean of what the files hold under its name; False, and unchanged, where one has no such
    thing or another shape."""
    if any(reader.shapes.get(name) != tuple(tensor.shape) for reader in readers):
        return False
    if len(readers) == 1:
        readers[0].load(name, tensor)
        return True
    total, part = torch.zeros_like(tensor), torch.empty_like(tensor)
    for reader in readers:
        reader.load(name, part)
        total += part
    tensor.copy_(total / len(readers))
    return True
