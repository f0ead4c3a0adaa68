"""What evaluate.py reports beside the headline: calibration and the domains, from the same forward passes."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from omegaconf import DictConfig

from lmforge.data.module import TokenWindows
from lmforge.data.order import Integers
from lmforge.data.packing import PackedRows
from lmforge.data.shards import TokenShards
from lmforge.data.windows import Windows
from lmforge.evaluation.calibration import Reliability
from lmforge.evaluation.domains import DomainSums, document_names, domain_of, label_documents, totals
from lmforge.tasks.metrics import TokenScores, count_as_updated
from lmforge.tasks.update import UpdateTask


class Details(pl.Callback):
    """Watches every scored token. After the validation `results` holds, equal on all ranks, `ece`, `calibration` and
    `domains` as far as they were asked for and can be known."""

    def __init__(self, cfg: DictConfig, data: TokenWindows):
        self.data, self.split = data, cfg.split
        self.reliability = Reliability(cfg.calibration_bins) if cfg.calibration_bins else None
        self.sources = list(data.manifest.get("sources", ()))  # of a mixture, whose windows say theirs
        self.of_document: Integers | None = None  # the number of each document's domain
        self.windows: Windows | None = None
        self.sums = self._domains() if cfg.domains and data.has(cfg.split) else None
        self.here: torch.Tensor | None = None  # domains of the window that is being scored
        self.results: dict[str, Any] = {}

    def _domains(self) -> DomainSums | None:
        if self.sources:
            return DomainSums(self.sources, [])
        names = document_names(TokenShards.open(self.data.folder, self.split))
        if names is None:
            return None
        domains = [domain_of(name, self.data.manifest.get("source")) for name in names]
        listed, self.of_document = np.unique(np.array(domains), return_inverse=True)
        return DomainSums(listed.tolist(), domains)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        pl_module.watch = self._watch
        if self.of_document is not None:
            self.windows = Windows(*self.data.scored(self.data.rows(self.split)))  # for the numbers of their rows
        for metric in (self.reliability, self.sums):
            if metric is not None:
                metric.to(trainer.strategy.root_device)
                count_as_updated(metric)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert isinstance(pl_module, UpdateTask)
        if self.sums is None:
            return
        if self.windows is None or self.of_document is None:
            number = self.sources.index(batch["source"])
            places = sum(each["labels"].numel() for each in batch["micro_batches"])
            domain = np.full(places, number)
        else:
            assert isinstance(self.windows.rows, PackedRows)
            documents = label_documents(self.windows.rows, self.windows.numbers(batch_idx).ravel())
            domain = self.of_document[documents].ravel()
        self.here = self._shared(domain, batch["micro_batches"], pl_module)

    def _shared(self, domain: Integers, micro_batches: list[dict[str, torch.Tensor]], task: UpdateTask) -> torch.Tensor:
        """Domains of the places that this rank computes, as the micro-batches lie."""
        assert task.parallel is not None
        rows = torch.from_numpy(domain).view(-1, micro_batches[0]["labels"].shape[1]).to(task.device)
        parts = rows.split([len(each["labels"]) for each in micro_batches])
        return torch.cat([task.parallel.share({"labels": part})["labels"].flatten() for part in parts])

    def _watch(self, scores: TokenScores) -> None:
        if self.reliability is not None:
            self.reliability.update(scores)
        if self.sums is not None:
            assert self.here is not None
            places = len(scores.loss)
            self.sums.update(scores, self.here[:places])
            self.here = self.here[places:]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A collective: all ranks bring their sums together."""
        if self.sums is not None and (domains := self.sums.compute()):
            self.results |= {**totals(domains), "domains": domains}
        if self.reliability is not None and (calibration := self.reliability.compute()):
            self.results |= {"ece": calibration.pop("ece"), "calibration": calibration}
