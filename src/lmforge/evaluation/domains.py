"""Which part of a data set a target belongs to, and the sums of each part."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lmforge.config.errors import UsageError
from lmforge.data.order import Integers
from lmforge.data.packing import PackedRows
from lmforge.data.shards import NAMES, TokenShards
from lmforge.data.sources import stdlib_family
from lmforge.tasks.metrics import TokenScores, ratios

_PLACE = re.compile(r"(:\d+|\[\d*:\d*\])$")  # a line of a .jsonl file, a part of a document that was cut


def document_names(shards: TokenShards) -> list[str] | None:
    """The documents' names in their order, None where the shards do not know them; UsageError when they do not fit."""
    file = shards.folder / NAMES
    if not file.is_file():
        return None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))[shards.split]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file}: cannot be read ({type(error).__name__} {error})") from error
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not fits or len(names) != shards.n_documents:
        raise UsageError(f"{file}: names of {shards.n_documents} {shards.split} documents expected")
    return names


def domain_of(name: str, source: str | None) -> str:
    """The top-level package of a standard library file; else the top-level folder, or the file itself without one."""
    if source == "stdlib":
        return stdlib_family(name)
    return _PLACE.sub("", name.split("/", 1)[0])


def label_documents(rows: PackedRows, numbers: Integers) -> Integers:
    """The document of every label of these rows, `[len(numbers), context]`; what stands where no label counts means
    nothing. Row i begins at token `i * stride`, and a label is the token after its place."""
    place = np.maximum(numbers, 0)[:, None] * rows.stride + np.arange(1, rows.context + 1)
    found = np.searchsorted(rows.shards.offsets, place, side="right") - 1
    return np.minimum(found, len(rows.shards.offsets) - 2)


class DomainSums(Metric):
    """Loss, right answers and bytes of every domain; the sums over domains are those of the whole split."""

    full_state_update = False

    loss: Tensor
    targets: Tensor
    correct: Tensor
    bytes: Tensor

    def __init__(self, domains: Sequence[str], documents: Sequence[str], **kwargs: Any):
        """`documents` holds the domain of each document, to be counted; empty where that is not known."""
        super().__init__(**kwargs)
        self.domains, self.documents = list(domains), Counter(documents)
        self.add_state("loss", torch.zeros(len(domains), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("targets", "correct", "bytes"):
            self.add_state(name, torch.zeros(len(domains), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: TokenScores, domain: Tensor) -> None:
        """`domain` is int64 `[n]`, the number of each place's domain."""
        self.loss.index_add_(0, domain, scores.loss)
        self.targets.index_add_(0, domain, scores.counted.long())
        self.correct.index_add_(0, domain, scores.correct.long())
        self.bytes.index_add_(0, domain, scores.bytes)

    def compute(self) -> dict[str, dict[str, Any]]:
        """Domain -> its sums and ratios, the hardest first; domains without targets are left out."""
        columns = (self.loss, self.targets, self.correct, self.bytes)
        rows = zip(self.domains, *(column.tolist() for column in columns), strict=True)
        found = {name: self._row(name, *sums) for name, *sums in rows if sums[1]}
        measure = "bits_per_byte" if all("bits_per_byte" in row for row in found.values()) else "loss"
        return dict(sorted(found.items(), key=lambda item: (-item[1][measure], item[0])))

    def _row(self, name: str, nats: float, targets: int, correct: int, size: int) -> dict[str, Any]:
        sums = {"nats": nats, "targets": targets, "correct": correct, "bytes": size}
        known = {"documents": self.documents[name]} if self.documents else {}
        return {**ratios(nats, targets, correct, size), **sums, **known}


def totals(domains: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ratios of all domains together, from the very sums that stand in their rows."""
    nats, targets, correct, size = (
        sum(row[key] for row in domains.values()) for key in ("nats", "targets", "correct", "bytes")
    )
    return ratios(nats, targets, correct, size)
