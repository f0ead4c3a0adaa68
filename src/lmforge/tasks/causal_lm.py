"""Predict the next token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.data.packing import IGNORED
from lmforge.tasks.cross_entropy import in_chunks, summed_cross_entropy, token_cross_entropy
from lmforge.tasks.metrics import Counts, TokenScores
from lmforge.tasks.update import UpdateTask


class CausalLM(UpdateTask):
    """Cross-entropy of the next token over packed rows.

    `token_bytes` is int64 `[tokenizer size]`, the UTF-8 bytes of each id; None when the tokenizer is not known.
    `loss_chunk` positions at a time have logits; None for all at once.
    """

    def __init__(self, *, token_bytes: Tensor | None, loss_chunk: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.token_bytes, self.loss_chunk = token_bytes, loss_chunk

    def count(self, batch: dict[str, Tensor]) -> Counts:
        if self.loss_chunk is None:
            return super().count(batch)
        assert self.parallel is not None
        batch = self.parallel.share(batch)
        score = partial(self.measure, labels=batch["labels"])
        counts: Counts = self.parallel.forward(*self.inputs(batch), score=score)
        return counts

    def measure(self, hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor) -> Counts:
        labels = labels.flatten()
        part: Any = summed_cross_entropy if self.training else self._score
        if self.loss_chunk is None:
            found = part(head(hidden).flatten(0, 1), labels)
        else:
            join = _sum if self.training else _end_to_end
            found = in_chunks(hidden, head, part=part, join=join, labels=labels, chunk=self.loss_chunk)
        if self.training:  # nobody reads the other sums
            return Counts(found, (labels != IGNORED).sum())
        if self.watch is not None and (self.parallel is None or self.parallel.reports):
            self.watch(found)
        return Counts(*(values.sum() for values in found[:4]))

    @torch.no_grad()
    def _score(self, logits: Tensor, labels: Tensor) -> TokenScores:
        """The most probable token's probability comes from the loss: both share the softmax's denominator."""
        counted, target = labels != IGNORED, labels.clamp(min=0)
        losses = token_cross_entropy(logits, labels)
        top, choice = logits.max(dim=-1)
        gap = top.double() - logits.gather(1, target[:, None]).squeeze(1).double()
        confidence = torch.exp(gap - losses).clamp(max=1.0)
        return TokenScores(losses, counted, (choice == labels) & counted, self._bytes(target, counted), confidence)

    def _bytes(self, target: Tensor, counted: Tensor) -> Tensor:
        if self.token_bytes is None:
            return torch.zeros_like(target)
        self.token_bytes = self.token_bytes.to(target.device)
        return self.token_bytes[target] * counted


def _sum(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()


def _end_to_end(parts: list[TokenScores]) -> TokenScores:
    return TokenScores(*(torch.cat(values) for values in zip(*parts, strict=True)))
