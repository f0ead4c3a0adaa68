"""Pipeline parallelism: each rank holds some blocks and passes hidden states on, on torch's own schedules.

The micro-batches of a window are the pipeline's, so nothing about batch, loss or step changes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from lmforge.parallel.mesh import Mesh
from lmforge.parallel.norm import local, spread_norm
from lmforge.parallel.parallel import Batch, Objective
from lmforge.parallel.sharded import Sharded


class _Stage(nn.Module):
    """Some blocks of a network as torch's schedule calls them. The network is not registered: its parameters are the
    run's, and FSDP's hooks on it do their work."""

    def __init__(self, network: nn.Module, layers: range):
        super().__init__()
        self.run, self.layers = [network], layers

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """Ids or hidden states -> hidden states, the last ones normalised."""
        return self.run[0](x, doc_ids, positions, layers=self.layers, score=_hidden)


def stages_of(layers: int, pp: int, virtual: int, rank: int) -> dict[int, range]:
    """The stages of one pipeline rank by number, each with an equal share of the blocks; they are dealt out in turn."""
    each = layers // (pp * virtual)
    return {stage: range(stage * each, (stage + 1) * each) for stage in range(rank, pp * virtual, pp)}


class Piped(Sharded):
    """Losses and counts are known on the last stage; what other ranks need of them travels with the metrics."""

    def __init__(self, network: nn.Module, mesh: Mesh, virtual: int, dtype: torch.dtype):
        super().__init__(network, mesh)
        self.group = mesh.grid["pp"].get_group()
        self.pp, self.dtype = mesh.layout.pp, dtype
        self.total = self.pp * virtual
        self.stages = stages_of(network.n_layer, self.pp, virtual, mesh.place.pp)  # type: ignore[arg-type]
        self.ends = mesh.ends_group() if network.head is None else None  # both ends hold a tied embedding
        self.schedules: dict[Any, Any] = {}
        self.infer = self._chain
        self.vocabulary, self.width = (int(size) for size in network.embed.weight.shape)  # type: ignore[union-attr]
        network.keep({layer for layers in self.stages.values() for layer in layers})  # type: ignore[operator]

    # an update

    def window(self, micro_batches: list[Batch], objective: Objective) -> list[Any]:
        shared = [self.share(batch) for batch in micro_batches]
        ids, doc_ids, positions = (torch.cat(parts) for parts in zip(*map(objective.inputs, shared), strict=True))
        counted: list[Any] = []

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            counts = objective.measure(hidden, self.network.logits, labels)  # type: ignore[arg-type]
            counted.append(counts._replace(loss=counts.loss.detach()))
            return objective.weighed(counts)

        objective.micro_batch = len(shared)  # several are on their way at once
        schedule = self._schedule(len(shared), shared[0]["input_ids"])
        schedule._loss_fn = loss
        self.network.set_requires_gradient_sync(False)  # type: ignore[operator]
        self.network.set_is_last_backward(False)  # type: ignore[operator]
        labels = torch.cat([batch["labels"] for batch in shared])
        first = (ids,) if 0 in self.stages else ()
        schedule.step(*first, doc_ids=doc_ids, positions=positions, target=labels, return_outputs=False)
        self._reduce()
        return counted

    def _schedule(self, micro_batches: int, ids: Tensor) -> Any:
        """One for each shape of a window, and there are few."""
        key = (micro_batches, ids.shape)
        if key not in self.schedules:
            stages = [self._stage(number, ids) for number in self.stages]
            options: dict[str, Any] = {"loss_fn": _no_loss, "scale_grads": False}
            self.schedules[key] = (
                Schedule1F1B(stages[0], micro_batches, **options)
                if len(stages) == 1
                else ScheduleInterleaved1F1B(stages, micro_batches, **options)  # type: ignore[arg-type]
            )
        return self.schedules[key]

    def _stage(self, number: int, ids: Tensor) -> PipelineStage:
        """With the shapes of what comes in and goes out, so that none has to be found out by a trial run."""
        batch, time = ids.shape
        part = self._part(time)
        hidden = torch.empty(batch, part, self.width, dtype=self.dtype, device="meta", requires_grad=True)
        into = torch.empty_like(ids, device="meta") if number == 0 else hidden
        out = hidden if number < self.total - 1 else hidden.new_empty(batch, time, self.width, requires_grad=True)
        stage = _Stage(self.network, self.stages[number])
        return PipelineStage(stage, number, self.total, ids.device, into, out, group=self.group)

    def _part(self, time: int) -> int:
        """The positions of a sequence that a rank passes on: under tensor parallelism its own."""
        tp = self.mesh.layout.tp
        return time if time % tp else time // tp

    def _reduce(self) -> None:
        """Average the window's gradients now. FSDP would do it in hooks of the last backward pass, which a schedule of
        several stages on one network does not have; torch's own stages do the same."""
        for name in ("set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync"):
            getattr(self.network, name)(True)
        root = fully_shard.state(self.network)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        root._root_post_backward_final_callback()
        table = self._shared_table()
        if table is not None and table.grad is not None:
            dist.all_reduce(local(table.grad), group=self.ends)

    def _shared_table(self) -> nn.Parameter | None:
        """The tied embedding where this rank is at an end of the pipeline: its gradient is the sum of both ends'."""
        return self.network.embed.weight if self.ends is not None and hasattr(self.network, "embed") else None

    def norm(self) -> Tensor:
        parameters = dict(self.network.named_parameters())
        gradients = [p.grad for name, p in parameters.items() if p.grad is not None and self.owns(name)]
        return spread_norm(gradients, next(iter(parameters.values())).device)

    def owns(self, name: str) -> bool:
        """The last stage's copy of a tied embedding is the first one's business."""
        return not (name.startswith("embed.") and 0 not in self.stages)

    # without gradients

    def score(self, batch: Batch, objective: Objective) -> Any | None:
        shared = self.share(batch)
        ids, doc_ids, positions = objective.inputs(shared)
        hidden = self._pass_on(ids, doc_ids, positions, cache=None)
        if hidden is None:
            return None
        return objective.measure(hidden, self.network.logits, shared["labels"])  # type: ignore[arg-type]

    def _chain(
        self, ids: Tensor, doc_ids: Tensor | None = None, positions: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """What the whole network gives, logits `[batch, time, vocabulary]`, on every rank; for generation."""
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        hidden = self._pass_on(ids, doc_ids, positions, cache)
        if hidden is None:
            logits = torch.empty(*ids.shape, self.vocabulary, dtype=self.dtype, device=ids.device)
        else:
            logits = self.network.logits(hidden).contiguous()  # type: ignore[operator]
        if cache is not None and hidden is None:  # the network counts where its last block runs
            cache.length += ids.shape[1]
        dist.broadcast(logits, self._rank_of(self.total - 1), group=self.group)
        return logits

    @torch.no_grad()
    def _pass_on(self, ids: Tensor, doc_ids: Tensor | None, positions: Tensor, cache: Any) -> Tensor | None:
        """Hidden states through all stages, one after the other; the last ones, on the rank that has the last stage."""
        x = ids
        for number, layers in self.stages.items():
            if number > 0:
                x = torch.empty(ids.shape[0], self._part(ids.shape[1]), self.width, dtype=self.dtype, device=ids.device)
                dist.recv(x, self._rank_of(number - 1), group=self.group)
            x = self.network(x, doc_ids, positions, cache, layers=layers, score=_hidden)
            if number < self.total - 1:
                dist.send(x.contiguous(), self._rank_of(number + 1), group=self.group)
        return x if self.total - 1 in self.stages else None

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage % self.pp)


def _no_loss(*_: Any) -> None:
    raise AssertionError("a window sets the loss of its objective")


def _hidden(hidden: Tensor, head: Any) -> Tensor:
    return hidden
