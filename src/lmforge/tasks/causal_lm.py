"""Predict the next token."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.data.packing import IGNORED
from lmforge.tasks.cross_entropy import chunked_cross_entropy, summed_cross_entropy
from lmforge.tasks.update import UpdateTask
from lmforge.training.metrics import Counts


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
        loss = summed_cross_entropy(logits, labels)
        return Counts(loss, *self._tally(logits.detach(), labels))

    @torch.no_grad()
    def _tally(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Targets, correct ones and their bytes; the last two only where somebody reads them, in evaluation."""
        counted = labels != IGNORED
        if self.training:
            return counted.sum(), None, None
        correct = ((logits.argmax(-1) == labels) & counted).sum()
        if self.token_bytes is None:
            return counted.sum(), correct, None
        self.token_bytes = self.token_bytes.to(labels.device)
        return counted.sum(), correct, self.token_bytes[labels.clamp(min=0)].mul(counted).sum()
