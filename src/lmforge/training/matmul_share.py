"""Which dtype the matrix products of the first step were really done in; a word like bf16-mixed is only a wish."""

import logging
from collections import Counter
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.tasks.update import UpdateTask

log = logging.getLogger(__name__)
ENOUGH = 0.9  # share of the FLOPs below which a warning names the others
NAMED = 3  # of what ran in another dtype, the largest
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # where the first factor stands among the arguments
ATTENTION = "_scaled_dot_product"


def flops_of(name: str, tensors: list[Tensor]) -> int:
    """FLOPs of an ATen operation by its name and tensor arguments: a matrix product or fused attention.

    Attention is two products, however much of them a causal mask saves.
    """
    if name in PRODUCTS:
        first, second = tensors[PRODUCTS[name] : PRODUCTS[name] + 2]
        return 2 * first.numel() * second.shape[-1]
    return 4 * tensors[0].numel() * tensors[1].shape[-2]


def backward_flops(name: str, tensors: list[Tensor], forward: int) -> int:
    """FLOPs that a gradient through an operation will take: a product for each factor that wants one, and five for
    attention, which computes its weights again."""
    if not torch.is_grad_enabled():
        return 0
    if name in PRODUCTS:
        factors = tensors[PRODUCTS[name] : PRODUCTS[name] + 2]
        return forward * sum(factor.requires_grad for factor in factors)
    return forward * 5 // 2 * any(tensor.requires_grad for tensor in tensors[:3])


class _Products(TorchDispatchMode):
    """Adds up FLOPs by operation and dtype of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in PRODUCTS or name.startswith(ATTENTION):
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            forward = flops_of(name, tensors)
            self.flops[name.strip("_"), tensors[0].dtype] += forward + backward_flops(name, tensors, forward)
        return func(*args, **(kwargs or {}))


class MatmulFlops(TorchFunctionMode):
    """Adds up FLOPs by operation and dtype of its inputs: what runs forward is seen, and what autograd will make of it
    backward follows from that.

    A backward pass runs unseen, since under a dispatch mode autograd adds up gradients in new tensors instead of in
    place: with a loss in chunks a third more peak memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = _Products()

    @property
    def flops(self) -> Counter[tuple[str, torch.dtype]]:
        return self.products.flops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with nullcontext() if func is Tensor.backward else self.products:
            return func(*args, **(kwargs or {}))

    def share(self, dtype: torch.dtype) -> float | None:
        """Of all FLOPs those with inputs of `dtype`; None when there were none at all."""
        total = sum(self.flops.values())
        return sum(count for (_, found), count in self.flops.items() if found == dtype) / total if total else None

    def others(self, dtype: torch.dtype) -> str:
        """The largest of what had inputs of another dtype, in words."""
        total = sum(self.flops.values())
        rest = sorted(((count, op, found) for (op, found), count in self.flops.items() if found != dtype), key=str)
        largest = sorted(rest, key=lambda one: -one[0])[:NAMED]
        return ", ".join(f"{op} in {str(found)[6:]} {count / total:.1%}" for count, op, found in largest)


class MatmulShare(pl.Callback):
    """Watches the gradients of the process's first step being computed, says the share in one line, and is done.

    Compiled blocks hide their operations, so with `compile` there is no number. `share` is that of this rank; all
    ranks do the same work, but for the stages of a pipeline.
    """

    def __init__(self) -> None:
        self.seen: MatmulFlops | None = None
        self.share: float | None = None
        self.warning: str | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        if pl_module.plan.compile_backend is not None:
            log.info("matmuls     dtype not measured: compiled blocks hide their operations")
            return
        self.seen = pl_module.around_gradients = MatmulFlops()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.seen is not None:
            assert isinstance(pl_module, UpdateTask)
            pl_module.around_gradients = None
            self._tell(self.seen, pl_module.precision.compute)
            self.seen = None

    def _tell(self, seen: MatmulFlops, asked: torch.dtype) -> None:
        self.share = seen.share(asked)
        if self.share is None:
            return
        line = f"{self.share:.1%} of the FLOPs of matrix products were in {str(asked)[6:]}"
        if self.share < ENOUGH:
            self.warning = f"only {line}; others: {seen.others(asked)}"
        log.log(logging.WARNING if self.warning else logging.INFO, self.warning or f"matmuls     {line} (first step)")
