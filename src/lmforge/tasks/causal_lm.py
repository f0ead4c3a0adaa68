"""Predict the next token."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.data.packing import IGNORED
from lmforge.tasks.cross_entropy import chunked_cross_entropy, summed_cross_entropy, token_cross_entropy
from lmforge.tasks.update import UpdateTask
from lmforge.training.metrics import Counts, TokenScores


class CausalLM(UpdateTask):
    """Cross-entropy of the next token over packed rows.

    `token_bytes` is int64 `[tokenizer size]`, the UTF-8 bytes of each id; None when the tokenizer is not known.
    `loss_chunk` positions at a time have logits in training; None for all at once.
    """

    def __init__(self, *, token_bytes: Tensor | None, loss_chunk: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.token_bytes, self.loss_chunk = token_bytes, loss_chunk

    def count(self, batch: dict[str, Tensor]) -> Counts:
        labels = batch["labels"].flatten()
        assert self.parallel is not None
        if self.training and self.loss_chunk is not None:
            score = partial(chunked_cross_entropy, labels=labels, chunk=self.loss_chunk)
            loss = self.parallel.forward(batch["input_ids"], batch["doc_ids"], batch["positions"], score=score)
            return Counts(loss, (labels != IGNORED).sum())
        logits = self.parallel.forward(batch["input_ids"], batch["doc_ids"], batch["positions"]).flatten(0, 1)
        if self.training:  # nobody reads the other sums
            return Counts(summed_cross_entropy(logits, labels), (labels != IGNORED).sum())
        scores = self._score(logits, labels)
        if self.watch is not None:
            self.watch(scores)
        return Counts(*(values.sum() for values in scores[:4]))

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
