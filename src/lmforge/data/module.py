"""LightningDataModules: where the tokens come from differs, how they become windows does not."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lmforge.config.batch import BatchPlan
from lmforge.config.errors import UsageError
from lmforge.data.order import SampleOrder
from lmforge.data.packing import PackedRows
from lmforge.data.prepare import prepare_stdlib, prepare_text
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.tokenizer import Tokenizer
from lmforge.data.windows import Window, Windows
from lmforge.data.workers import outlast_signals

ORDER_VERSION = 1  # changes with the order of samples, so that no run goes on under another order


class TokenWindows(pl.LightningDataModule):
    """Windows of packed rows out of a folder of token shards.

    Its whole state is the number of updates done, which the trainer counts, and `fingerprint`. Late facts come with
    `connect`; a loader is made for whatever rank and step the trainer is at.
    """

    def __init__(
        self,
        folder: Path,
        context: int,
        overlap: float = 0.0,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch: int | None = None,
        limit_train_rows: int | None = None,
    ):
        super().__init__()
        self.folder, self.context = Path(folder), context
        self.stride = max(1, round(context * (1.0 - overlap)))
        self.limit_train_rows = limit_train_rows
        self.num_workers, self.pin_memory, self.prefetch = num_workers, pin_memory, prefetch
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        tokenizer = self.folder / "tokenizer.json"
        self.tokenizer = Tokenizer.load(tokenizer) if tokenizer.exists() else None
        self.train = PackedRows(TokenShards.open(self.folder, "train"), context, limit_train_rows)
        self.train_loader: TimedLoader | None = None
        if len(self.train) == 0:
            raise UsageError(f"{self.folder}: the train split holds no target token")

    def connect(self, plan: BatchPlan, seed: int, samples: int, start: tuple[int, int] = (0, 0)) -> None:
        """The batch plan, the seed of the order, the samples of the whole run, and the (update, sample) done so far."""
        self.plan, self.seed, self.samples, self.start = plan, seed, samples, start

    @property
    def vocab_size(self) -> int:
        """Ids the embedding needs rows for, added tokens included."""
        return int(self.manifest["vocab_size"])

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides which sample has which number."""
        shards = [shard["sha256"] for shard in self.manifest["splits"]["train"]["shards"]]
        facts = [ORDER_VERSION, shards, self.context, self.limit_train_rows, self.seed, self.plan.sequences]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def samples_at(self, step: int) -> int:
        """Samples used up by the first `step` updates of the run; the last update may have been a short one."""
        return min(self.start[1] + (step - self.start[0]) * self.plan.sequences, self.samples)

    def epochs(self, step: int) -> float:
        """Passes over the train split after `step` updates."""
        return self.samples_at(step) / len(self.train)

    def rows(self, split: str) -> PackedRows:
        """Rows to score: of overlapping ones only the last `stride` positions count."""
        return PackedRows(TokenShards.open(self.folder, split), self.context, stride=self.stride)

    def train_dataloader(self) -> "TimedLoader":
        order = SampleOrder(len(self.train), self.seed)
        rank, plan = self._share()
        windows = Windows(self.train, order, plan, rank, self.samples, self.start)
        self.train_loader = TimedLoader(self._loader(windows, range(self.start[0], len(windows))))
        return self.train_loader

    def val_dataloader(self) -> Any:
        return self.scoring_loader("val") if self.has("val") else []

    def scoring_loader(self, split: str) -> "Loader":
        """Every target of a split once, in order; all ranks get the same number of batches, some without targets."""
        if not self.has(split):
            raise UsageError(f"split={split}: {self.folder} has no tokens in it; it has {', '.join(self._splits())}")
        rank, plan = self._share()
        rows = self.rows(split)
        plan = replace(plan, sequences=plan.micro * plan.world, accumulation=1)
        windows = Windows(rows, SampleOrder(len(rows), 0, shuffle=False), plan, rank, len(rows))
        return self._loader(windows, range(len(windows)))

    def has(self, split: str) -> bool:
        """Whether the split is there and holds anything to predict."""
        return split in self._splits()

    def _splits(self) -> list[str]:
        return [name for name, facts in self.manifest["splits"].items() if facts["tokens"] > 1]

    def _share(self) -> tuple[int, BatchPlan]:
        """This process's rank and the plan for as many ranks as there really are."""
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        if world == self.plan.world:
            return rank, self.plan
        accumulation = -(-self.plan.sequences // (world * self.plan.micro))
        return rank, replace(self.plan, world=world, accumulation=accumulation)

    def _loader(self, windows: Windows, updates: range) -> "Loader":
        if not (self.num_workers or self.pin_memory):
            return _Plain(windows, updates)
        return DataLoader(
            windows,
            sampler=updates,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch if self.num_workers else None,
            worker_init_fn=outlast_signals,
            generator=torch.Generator().manual_seed(self.seed),  # else its base seed comes from the global stream
        )


class _Plain:
    """Windows one after the other, built here: `DataLoader` would cost more than most of them."""

    def __init__(self, windows: Windows, updates: range):
        self.windows, self.updates = windows, updates

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Window]:
        return map(self.windows.__getitem__, self.updates)


Loader = DataLoader[Window] | _Plain


class TimedLoader:
    """A loader that adds up how long its user waited for it, and how long samples took to build."""

    def __init__(self, loader: Loader):
        self.loader = loader
        self.wait_seconds = 0.0
        self.build_seconds = 0.0
        self.samples = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Window]:
        windows = iter(self.loader)
        while True:
            began = time.perf_counter()
            window = next(windows, None)
            self.wait_seconds += time.perf_counter() - began
            if window is None:
                return
            self.build_seconds += window["seconds"]
            self.samples += window["samples"]
            yield window


class StdlibData(TokenWindows):
    """The Python standard library, prepared at first use and cached by content."""

    def __init__(self, *, vocab_size: int, cache: Path, **loading: Any):
        super().__init__(prepare_stdlib(vocab_size, Path(cache)), **loading)


class TextData(TokenWindows):
    """Text files of the user's own, prepared at first use and cached by content."""

    def __init__(self, *, path: str, vocab_size: int, tokenizer: str | None, cache: Path, **loading: Any):
        super().__init__(prepare_text(path, vocab_size, tokenizer, Path(cache)), **loading)


class TokenData(TokenWindows):
    """Shards that lie ready, with their manifest."""

    def __init__(self, *, path: str, cache: Path, **loading: Any):
        super().__init__(Path(path), **loading)
