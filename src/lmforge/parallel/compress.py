"""Smaller gradients for slow wires: what DDP calls with each bucket of gradients in place of its own all-reduce."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lmforge.parallel.memory import Memory
from lmforge.parallel.precision import ForwardPrecision
from lmforge.parallel.traffic import Traffic, gradient_bytes, size

# Gradients of a mean loss lie at the lower end of float16 (6e-8 to 65504); so many times larger they lie in its middle.
FLOAT16_UNIT = 1024.0


def compression(
    word: str, network: nn.Module, precision: ForwardPrecision, rank: int, start_step: int
) -> "Compression | None":
    """What a word of `strategy.compress` means; None for `none`."""
    scaler = precision.scaler
    if word == "powersgd":
        return PowerSGD(network, rank, start_step, scaler.get_scale if scaler.is_enabled() else lambda: 1.0)
    if word == "fp16":
        return Rounded(network, torch.float16, 1.0 if scaler.is_enabled() else FLOAT16_UNIT)
    return Rounded(network, torch.bfloat16) if word == "bf16" else None


class Compression:
    """Averages each bucket over the ranks, as DDP itself does, and counts what that takes.

    A gradient that is not finite on one rank is not finite on any afterwards.
    """

    def __init__(self, network: nn.Module):
        self.world = dist.get_world_size()
        self.traffic = Traffic(gradient_bytes(network))
        self.memory = Memory()

    def register(self, replica: DistributedDataParallel) -> None:
        def hook(compression: Compression, bucket: dist.GradBucket) -> Future[Tensor]:
            return compression.exchange(bucket)

        replica.register_comm_hook(self, hook)

    def exchange(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP calls this in the backward pass for one bucket after the other, on all ranks in the same order."""
        self.traffic.calls += 1
        if bucket.index() == 0:
            self.traffic.sent = 0.0
        return self.send(bucket)

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start the exchange; the future's value is the bucket's buffer with the averages in it."""
        raise NotImplementedError

    def sum(self, tensor: Tensor) -> Future[list[Tensor]]:
        """All-reduce in place, counted."""
        self.traffic.sent += size([tensor])
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future()


class Rounded(Compression):
    """Gradients travel in a 16-bit dtype, divided by the ranks before so that their sum fits."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, unit: float = 1.0):
        super().__init__(network)
        self.dtype, self.unit = dtype, unit

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        whole = bucket.buffer()
        low = (whole * (self.unit / self.world)).to(self.dtype)
        return self.sum(low).then(lambda summed: whole.copy_(summed.value()[0]).div_(self.unit))


class PowerSGD(Compression):
    """Matrices travel as two thin factors of `rank` columns (Vogels et al. 2019), all else as it is.

    One power iteration an update, from the last one's factor. What the factors leave out stays in this rank's error
    memory and is added to its next gradient. Both are kept by parameter, since DDP changes its buckets, and the
    exchange begins when the last bucket is there: three messages, in an order that does not hang on timing. The first
    `start_step` updates travel whole. `scale` is the loss's factor, whose changes the memory must not see.
    """

    def __init__(self, network: nn.Module, rank: int, start_step: int, scale: Callable[[], float] = lambda: 1.0):
        super().__init__(network)
        self.start_step, self.scale = start_step, scale
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.groups = _groups(trained, rank)
        self.rest = [p for p in trained.values() if not any(p is q for group in self.groups for q in group.parameters)]
        self.updates = torch.zeros((), dtype=torch.int64)
        self.memory.shared["powersgd/updates"] = self.updates
        for group in self.groups:
            self.memory.own |= {f"powersgd/error/{name}": e for name, e in zip(group.names, group.errors, strict=True)}
            factors = zip(group.names, group.factors, strict=True)
            self.memory.shared |= {f"powersgd/factor/{name}": factor for name, factor in factors}
        self.waiting: list[tuple[Future[Tensor], Tensor]] = []
        self.gradients: dict[Tensor, Tensor] = {}  # of the buckets that wait, by parameter

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        whole, compressed = bucket.buffer(), int(self.updates) >= self.start_step
        self.updates += bucket.is_last()
        if not compressed:
            return self.sum(whole.div_(self.world)).then(lambda summed: summed.value()[0])
        future: Future[Tensor] = Future(devices=None if whole.is_cpu else [whole.device])
        self.waiting.append((future, whole))
        self.gradients |= zip(bucket.parameters(), bucket.gradients(), strict=True)
        if bucket.is_last():
            self._average(self.gradients)
            for waiting, buffer in self.waiting:
                waiting.set_result(buffer)
            self.waiting, self.gradients = [], {}
        return future

    @torch.no_grad()
    def _average(self, gradients: dict[Tensor, Tensor]) -> None:
        """Put averages over the ranks, those of matrices approximated, into the gradients."""
        scale = self.scale()
        whole = self._sums([gradients[p] / self.world for p in self.rest])
        matrices = [
            torch.stack([gradients[p] / scale for p in group.parameters]) + group.errors for group in self.groups
        ]
        thin = [orthonormal(group.factors) for group in self.groups]
        left = [orthonormal(t) for t in self._sums([m @ q for m, q in zip(matrices, thin, strict=True)])]
        right = self._sums([m.mT @ p for m, p in zip(matrices, left, strict=True)])
        finite = torch.stack([t.isfinite().all() for t in (*whole, *left, *right)]).all()
        for parameter, average in zip(self.rest, whole, strict=True):
            gradients[parameter].copy_(average)
        for group, m, p, q in zip(self.groups, matrices, left, right, strict=True):
            averages = group.approximate(m, p, q / self.world, finite) * scale
            for parameter, average in zip(group.parameters, averages, strict=True):
                gradients[parameter].copy_(average)

    def _sums(self, tensors: list[Tensor]) -> list[Tensor]:
        """Over the ranks; they travel as one message."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.sum(flat).wait()
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass
class _Group:
    """Matrices `[n, m]` of one shape, which go through the arithmetic as one batch of k."""

    names: list[str]
    parameters: list[nn.Parameter]
    errors: Tensor  # [k, n, m]
    factors: Tensor  # [k, m, rank], equal on all ranks

    def approximate(self, matrices: Tensor, left: Tensor, right: Tensor, finite: Tensor) -> Tensor:
        """What the factors stand for. An update that will be skipped, for it is not finite, leaves no trace."""
        average = left @ right.mT
        self.errors.copy_(torch.where(finite, matrices - average, self.errors))
        self.factors.copy_(torch.where(finite, right, self.factors))
        return torch.where(finite, average, torch.nan)


def _groups(trained: dict[str, nn.Parameter], rank: int) -> list[_Group]:
    by_shape: dict[torch.Size, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, p in trained.items():
        if p.dim() == 2 and rank * sum(p.shape) < p.numel():  # else two factors would be no smaller
            by_shape[p.shape][name] = p
    generator = torch.Generator().manual_seed(0)  # the same factors on all ranks
    return [_group(parameters, rank, generator) for parameters in by_shape.values()]


def _group(parameters: dict[str, nn.Parameter], rank: int, generator: torch.Generator) -> _Group:
    first = next(iter(parameters.values()))
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    errors = torch.zeros(len(parameters), *first.shape, dtype=dtype, device=first.device)
    factors = torch.randn(len(parameters), first.shape[1], rank, generator=generator).to(errors)
    return _Group(list(parameters), list(parameters.values()), errors, factors)


def orthonormal(matrices: Tensor) -> Tensor:
    """Columns of `[k, n, rank]` made orthonormal; of a matrix of zeros they are the first unit vectors."""
    return torch.linalg.qr(matrices).Q
