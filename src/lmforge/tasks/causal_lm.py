"""Predict the next token."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.data.packing import IGNORED
from lmforge.tasks.cross_entropy import in_chunks, summed_cross_entropy
from lmforge.tasks.update import UpdateTask
from lmforge.training.metrics import Counts


class CausalLM(UpdateTask):
    """Cross-entropy of the next token over packed rows.

    `token_bytes` is int64 `[tokenizer size]`, the UTF-8 bytes of each id; None when the tokenizer is not known.
    `loss_chunk` positions at a time have logits; None for all at once.
    """

    def __init__(self, *, token_bytes: Tensor | None, loss_chunk: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.token_bytes, self.loss_chunk = token_bytes, loss_chunk

    def count(self, batch: dict[str, Tensor]) -> Counts:
        labels = batch["labels"].flatten()
        assert self.parallel is not None
        inputs = (batch["input_ids"], batch["doc_ids"], batch["positions"])
        part = summed_cross_entropy if self.training else _loss_and_correct
        if self.loss_chunk is None:
            found = part(self.parallel.forward(*inputs).flatten(0, 1), labels)
        else:
            score = partial(in_chunks, part=part, labels=labels, chunk=self.loss_chunk)
            found = self.parallel.forward(*inputs, score=score)
        targets = (labels != IGNORED).sum()
        return (
            Counts(found, targets) if self.training else Counts(found[0], targets, found[1].long(), self._bytes(labels))
        )

    def _bytes(self, labels: Tensor) -> Tensor | None:
        if self.token_bytes is None:
            return None
        self.token_bytes = self.token_bytes.to(labels.device)
        return self.token_bytes[labels.clamp(min=0)].mul(labels != IGNORED).sum()


def _loss_and_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Float64 `[2]`: the sum of losses, and how many targets were the most probable token."""
    correct = ((logits.argmax(-1) == labels) & (labels != IGNORED)).sum()
    return torch.stack((summed_cross_entropy(logits, labels).double(), correct.double()))
