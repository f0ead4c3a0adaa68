"""Cross-entropy for training on 16-bit logits: one softmax in float32, its gradient made in the same pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmforge.data.packing import IGNORED

TINY = torch.finfo(torch.float32).tiny


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p over labels that count, in float32 or wider; logits `[n, vocabulary]`, labels int64 `[n]`.

    Where a gradient of 16-bit logits is wanted, one softmax in float32 serves loss and gradient: a sixth less time for
    a small network's head and loss than through a float32 copy of the logits, and half the memory.
    """
    if logits.requires_grad and logits.dtype in (torch.bfloat16, torch.float16):
        loss: Tensor = _LowCrossEntropy.apply(logits, labels)
        return loss
    return F.cross_entropy(_wide(logits), labels, ignore_index=IGNORED, reduction="sum")


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of each label, float64 `[n]`, computed in float32 or wider; 0 where a label does not count."""
    return F.cross_entropy(_wide(logits), labels, ignore_index=IGNORED, reduction="none").double()


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def in_chunks(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    part: Callable[[Tensor, Tensor], Any],
    join: Callable[[list[Any]], Any],
    labels: Tensor,
    chunk: int,
) -> Any:
    """`part(logits, labels)` of `chunk` positions at a time, joined, from the hidden state before the head.

    The backward pass computes the logits again, so that never more than one chunk's are held: with a large vocabulary
    they are most of a step's memory.
    """

    def of_hidden(hidden: Tensor, labels: Tensor) -> Any:
        return part(head(hidden), labels)

    pieces = zip(hidden.flatten(0, -2).split(chunk), labels.split(chunk), strict=True)
    return join([checkpoint(of_hidden, h, y, use_reentrant=False) for h, y in pieces])


class _LowCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        counted = labels != IGNORED
        target = labels.clamp(min=0)[:, None]
        p = torch.softmax(logits, dim=-1, dtype=torch.float32)
        losses = torch.where(counted, _losses(logits, p, target), 0.0)  # an ignored row may hold anything
        p.scatter_add_(1, target, torch.full_like(target, -1, dtype=p.dtype))
        ctx.save_for_backward(_without_rows(p, ~counted))  # where a checkpoint sees it, and drops it
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0]).to(ctx.dtype), None  # scaled in float32, then rounded


def _losses(logits: Tensor, p: Tensor, target: Tensor) -> Tensor:
    """-log p of each row's target; exact also where p is too small for float32, which are few rows if any.

    A CPU computes those rows alone; asking a GPU which they are would make it wait.
    """
    likely = p.gather(1, target).squeeze(1)
    losses = -likely.clamp(min=TINY).log()
    tiny = likely <= TINY
    if not tiny.is_cpu:
        return torch.where(tiny, _through_the_top(logits, p, target), losses)
    rows = tiny.nonzero().squeeze(1)
    return losses.index_copy_(0, rows, _through_the_top(logits[rows], p[rows], target[rows]))


def _through_the_top(logits: Tensor, p: Tensor, target: Tensor) -> Tensor:
    """-log p of the target as its logit's distance from the largest one, whose own p is at least 1 / vocabulary."""
    top, place = logits.max(dim=-1, keepdim=True)
    return (top.float() - logits.gather(1, target).float() - p.gather(1, place).log()).squeeze(1)


def _without_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Zeros in the rows where the mask says so, in place; on a CPU only these rows are touched."""
    if matrix.is_cpu:
        return matrix.index_fill_(0, rows.nonzero().squeeze(1), 0.0)
    return matrix.masked_fill_(rows[:, None], 0.0)
