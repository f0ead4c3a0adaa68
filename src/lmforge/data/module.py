"""LightningDataModules: where the tokens come from differs, how they become windows does not."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lmforge.config.batch import BatchPlan
from lmforge.config.errors import UsageError
from lmforge.config.layout import Layout
from lmforge.config.plain import hash_of
from lmforge.data.corpora import stdlib_shards, text_shards
from lmforge.data.order import SampleOrder
from lmforge.data.packing import PackedRows
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.tokenizer import Tokenizer
from lmforge.data.windows import Order, Rows, Window, Windows
from lmforge.data.workers import outlast_signals

ORDER_VERSION = 1  # changes with the order of samples, so that no run goes on under another order


class TokenWindows(pl.LightningDataModule):
    """Windows of packed rows out of a folder of token shards.

    Its whole state is the number of updates done, which the trainer counts, and `fingerprint`. Late facts come with
    `connect`; a loader is made for whatever rank and step the trainer is at.
    """

    faster = "try data.num_workers"  # what to do when training waits

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
        self.train_loader: TimedLoader | None = None
        self._open()

    def _open(self) -> None:
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        self.tokenizer = load_tokenizer(self.folder)
        self.train: Rows = train_rows(self.folder, self.context, self.limit_train_rows)

    def check_vocabulary(self, rows: int) -> None:
        """Raises UsageError when a model with `rows` embedding rows cannot take the ids."""
        if rows < self.vocab_size:
            raise UsageError(
                f"model.vocab_size={rows} is too small for the tokens in {self.folder}: {self.vocab_size} > {rows}"
            )

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
        facts = [ORDER_VERSION, *self._facts(), self.context, self.limit_train_rows, self.seed, self.plan.sequences]
        return hash_of(facts)[:16]

    def _facts(self) -> list[Any]:
        return [[shard["sha256"] for shard in self.manifest["splits"]["train"]["shards"]]]

    def samples_at(self, step: int) -> int:
        """Samples used up by the first `step` updates of the run; the last update may have been a short one."""
        return min(self.start[1] + (step - self.start[0]) * self.plan.sequences, self.samples)

    def epochs(self, step: int) -> float:
        """Passes over the train split after `step` updates."""
        return self.samples_at(step) / len(self.train)

    def position(self, step: int) -> Any:
        """What a checkpoint after `step` updates has to hold of this rank's data; shards need nothing but the step."""
        return None

    def go_on(self, step: int, position: Any) -> None:
        """Begin where `position` of a checkpoint of `step` updates was."""

    def by_source(self, step: int) -> dict[str, float]:
        """What each source of a mixture has given after `step` updates, by metric name; nothing for a single source."""
        return {}

    def train_dataloader(self) -> "TimedLoader":
        rank, plan = self._share()
        windows = Windows(self.train, self._order(), plan, rank, self.samples, self.start)
        self.train_loader = TimedLoader(self._loader(windows, range(self.start[0], len(windows))))
        return self.train_loader

    def val_dataloader(self) -> Any:
        return self.scoring_loader("val") if self.has("val") else []

    def scoring_loader(self, split: str) -> "Loader":
        """Every target of a split once, in order; all ranks get the same number of batches, some without targets."""
        if not self.has(split):
            raise UsageError(f"split={split}: {self.folder} has no tokens in it; it has {', '.join(self._splits())}")
        windows, order = self._scoring(split)
        return self._loader(windows, order)

    def rows(self, split: str, folder: Path | None = None) -> PackedRows:
        """Rows to score: of overlapping ones only the last `stride` positions count."""
        return PackedRows(TokenShards.open(folder or self.folder, split), self.context, stride=self.stride)

    def _order(self) -> Order:
        return SampleOrder(len(self.train), self.seed)

    def _scoring(self, split: str) -> tuple["Dataset[Window]", Sequence[int]]:
        """The windows of a split, and the order in which they are scored."""
        windows = Windows(*self.scored(self.rows(split)))
        return windows, range(len(windows))

    def scored(self, rows: PackedRows) -> tuple[PackedRows, SampleOrder, BatchPlan, int, int]:
        """What `Windows` over rows to score are made of."""
        rank, plan = self._share()
        plan = replace(plan, sequences=plan.micro * plan.dp, accumulation=1)
        return rows, SampleOrder(len(rows), 0, shuffle=False), plan, rank, len(rows)

    def has(self, split: str) -> bool:
        """Whether the split is there and holds anything to predict."""
        return split in self._splits()

    def _splits(self) -> list[str]:
        return [name for name, facts in self.manifest["splits"].items() if facts["tokens"] > 1]

    def _share(self) -> tuple[int, BatchPlan]:
        """Which of the plan's shares of the data this process reads, and the plan for as many as there really are."""
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        if world == self.plan.world:
            return self.plan.layout.place(rank).dp, self.plan
        accumulation = -(-self.plan.sequences // (world * self.plan.micro))
        return rank, replace(self.plan, layout=Layout(dp=world), devices=world, nodes=1, accumulation=accumulation)

    def _loader(self, windows: "Dataset[Window]", updates: Sequence[int]) -> "Loader":
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


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that lies beside shards, when it is known."""
    file = folder / "tokenizer.json"
    return Tokenizer.load(file) if file.exists() else None


def train_rows(folder: Path, context: int, limit: int | None) -> PackedRows:
    """The train split's rows, not one of them if there is nothing to predict: UsageError."""
    rows = PackedRows(TokenShards.open(folder, "train"), context, limit)
    if len(rows) == 0:
        raise UsageError(f"{folder}: the train split holds no target token")
    return rows


class _Plain:
    """Windows one after the other, built here: `DataLoader` would cost more than most of them."""

    def __init__(self, dataset: "Dataset[Window]", updates: Sequence[int]):
        self.dataset, self.updates = dataset, updates

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Window]:
        return map(self.dataset.__getitem__, self.updates)


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
        super().__init__(stdlib_shards({"vocab_size": vocab_size}, cache=Path(cache)), **loading)


class TextData(TokenWindows):
    """Text files of the user's own, prepared at first use and cached by content."""

    def __init__(
        self,
        *,
        path: str,
        vocab_size: int,
        tokenizer: str | None,
        cache: Path,
        text_key: str = "text",
        on_bad: str = "strict",
        **loading: Any,
    ):
        node = {"path": path, "text_key": text_key, "on_bad": on_bad, "vocab_size": vocab_size, "tokenizer": tokenizer}
        super().__init__(text_shards(node, cache=Path(cache)), **loading)


class TokenData(TokenWindows):
    """Shards that lie ready, with their manifest."""

    def __init__(self, *, path: str, cache: Path, **loading: Any):
        super().__init__(Path(path), **loading)
