"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022), from outside networks.

The network's classes say in `tensor_plan` what each of their layers is: `columns` and `rows` of a pair of matrices,
`vocabulary` of an embedding, and small ones that all ranks hold whole: `sequence` works on this rank's positions,
`heads` on its heads, `positions` looks its positions up. Between the pairs each rank holds its part of the sequence.
Parameters are DTensors on the mesh of these ranks, so sharding, clipping and checkpoints treat them like all others;
layers compute from their local parts.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lmforge.config.errors import UsageError
from lmforge.parallel.exchange import Team


class SequenceTeam(Team):
    """The ranks that share every matrix. `splits` says whether they share the present sequence as well, which they do
    unless its length does not divide (a single token that is generated)."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__(mesh.get_group())
        self.splits = True

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the network runs: how long is the sequence?"""
        named = dict(zip(("ids", "doc_ids", "positions"), args, strict=False)) | kwargs
        length = named["ids" if named.get("positions") is None else "positions"].shape[1]
        self.splits = length % self.size == 0

    def whole(self, x: Tensor) -> Tensor:
        """Hidden states `[batch, this rank's positions, width]` -> all positions, for matrices cut by columns."""
        return self.gather(x, 1) if self.splits else self.copy(x)

    def joined(self, x: Tensor) -> Tensor:
        """What matrices cut by rows give for all positions, each a summand -> this rank's positions of the sum."""
        return self.scatter(x, 1) if self.splits else self.sum(x)

    def mine(self, x: Tensor) -> Tensor:
        return self.own(x, 1) if self.splits else x


class _Part(nn.Module):
    """A layer of which this rank has a part, or uses the whole for a part of what there is."""

    team: SequenceTeam
    cut: ClassVar[dict[str, Placement]] = {}  # how a parameter is cut; else every rank holds it whole

    def local(self, name: str) -> Tensor | None:
        parameter = getattr(self, name, None)
        if not isinstance(parameter, DTensor):
            return parameter
        return parameter.to_local(grad_placements=[self.cut.get(name) or self._summand()])

    def _summand(self) -> Placement:
        """The gradient of what is held whole is a part of the sum as far as each rank saw its own positions."""
        return Partial() if self.team.splits else Replicate()


class _Columns(_Part, nn.Linear):
    cut: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.local("weight"), self.local("bias"))  # type: ignore[arg-type]


class _Rows(_Part, nn.Linear):
    cut: ClassVar[dict[str, Placement]] = {"weight": Shard(1)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.team.joined(F.linear(x, self.local("weight")))  # type: ignore[arg-type]
        bias = self.local("bias")
        return y if bias is None else y + bias


class _Vocabulary(_Part, nn.Embedding):
    cut: ClassVar[dict[str, Placement]] = {"weight": Shard(0)}

    def forward(self, ids: Tensor) -> Tensor:
        table = self.local("weight")
        assert table is not None
        row = ids - self.team.rank * table.shape[0]
        here = (row >= 0) & (row < table.shape[0])
        rows = F.embedding(row.where(here, 0), table)
        return self.team.joined(rows.masked_fill(~here[..., None], 0.0))


class _Positions(_Part, nn.Embedding):
    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(self.team.mine(positions), self.local("weight"))  # type: ignore[arg-type]


class _RMSNorm(_Part, nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.local("weight"), self.eps)


class _LayerNorm(_Part, nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.local("weight"), self.local("bias"), self.eps)


class _Heads(_Part):
    def _summand(self) -> Placement:
        return Partial()  # every rank has other heads, however the sequence lies


KINDS: dict[tuple[str, type[nn.Module]], type[_Part]] = {
    ("columns", nn.Linear): _Columns,
    ("rows", nn.Linear): _Rows,
    ("vocabulary", nn.Embedding): _Vocabulary,
    ("positions", nn.Embedding): _Positions,
    ("sequence", nn.RMSNorm): _RMSNorm,
    ("sequence", nn.LayerNorm): _LayerNorm,
    ("heads", nn.RMSNorm): type("_HeadsRMSNorm", (_Heads, _RMSNorm), {}),
    ("heads", nn.LayerNorm): type("_HeadsLayerNorm", (_Heads, _LayerNorm), {}),
}


def split_matrices(network: nn.Module, mesh: DeviceMesh) -> None:
    """Cut `network`, which is on the meta device, over the ranks of a one-dimensional mesh. Its names stay.

    The result takes and gives what the plain network does, on every rank the same: ids in, logits out.
    """
    team = SequenceTeam(mesh)
    network.register_forward_pre_hook(team.look, with_kwargs=True)
    for module in list(network.modules()):
        for name, word in getattr(type(module), "tensor_plan", {}).items():
            if (layer := _find(module, name)) is not None:
                _cut(layer, word, team, mesh)
        for name in getattr(type(module), "gathers", ()):
            if (branch := _find(module, name)) is not None:
                branch.register_forward_pre_hook(lambda _, args: (team.whole(args[0]), *args[1:]))
    _check_shared(network, mesh.size())
    norm = _find(network, "norm")
    if norm is not None:  # a pipeline's stages before the last have none
        norm.register_forward_hook(lambda _, args, output: team.whole(output))
    network.logits = _gathered(network, team)  # type: ignore[assignment]


def _check_shared(network: nn.Module, tp: int) -> None:
    """What no plan names would see this rank's positions alone, and drift apart from rank to rank."""
    left = [name for name, parameter in network.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise UsageError(
            f"strategy.tp={tp}: no tensor_plan of {type(network).__name__} or its blocks says how ranks share "
            f"{', '.join(left)}; add that, or strategy.tp=1"
        )


def _find(module: nn.Module, name: str) -> nn.Module | None:
    for part in name.split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    return None if isinstance(module, nn.Identity) else module


def _cut(layer: nn.Module, word: str, team: SequenceTeam, mesh: DeviceMesh) -> None:
    kind = KINDS[word, type(layer)]
    layer.__class__ = type(type(layer).__name__, (kind,), {})
    layer.team = team  # type: ignore[assignment]
    for name, parameter in list(layer.named_parameters(recurse=False)):
        placement = kind.cut.get(name, Replicate())
        cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _gathered(network: nn.Module, team: SequenceTeam) -> Callable[[Tensor], Tensor]:
    """The head's logits of this rank's part of the vocabulary, put together on every rank."""

    def logits(hidden: Tensor) -> Tensor:
        part: nn.Module = network.embed if network.head is None else network.head  # type: ignore[assignment]
        assert isinstance(part, _Part)
        weight = part.local("weight")
        assert weight is not None
        return team.collect(F.linear(hidden, weight.to(hidden.dtype)), -1)

    return logits
