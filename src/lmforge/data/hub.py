"""`data=hub`: a data set that the `datasets` library reads, as token shards or tokenised while it trains."""

import atexit
import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from lmforge.config.batch import BatchPlan
from lmforge.config.errors import UsageError
from lmforge.config.plain import hash_of
from lmforge.data.corpora import hub_prepared
from lmforge.data.documents import Report
from lmforge.data.head import HELD_OUT, head_shards, text_hash
from lmforge.data.hub_source import documents, open_rows
from lmforge.data.module import ORDER_VERSION, TimedLoader, TokenWindows, load_tokenizer
from lmforge.data.order import Integers
from lmforge.data.packing import IGNORED, PackedRows
from lmforge.data.randomness import seed_streams
from lmforge.data.shards import read_manifest
from lmforge.data.stream import START, Position, TokenStream, read_position
from lmforge.data.windows import Window

KEPT = 4  # updates whose positions are remembered: the trainer may have asked for one more than it did


def hub_data(
    *,
    name: str,
    config: str | None,
    split: str,
    revision: str | None,
    text_key: str,
    on_bad: str,
    streaming: bool,
    val_split: str | None,
    val_documents: int,
    shuffle_documents: int,
    vocab_size: int,
    tokenizer: str | None,
    cache: Path,
    context: int,
    overlap: float = 0.0,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch: int | None = None,
    limit_train_rows: int | None = None,
) -> TokenWindows:
    """The data set as `configs/data/hub.yaml` explains its keys."""
    node = {
        "name": name, "config": config, "split": split, "revision": revision, "text_key": text_key, "on_bad": on_bad,
        "val_split": val_split, "val_documents": val_documents, "vocab_size": vocab_size, "tokenizer": tokenizer,
    }  # fmt: skip
    loading: dict[str, Any] = {
        "context": context, "overlap": overlap, "num_workers": num_workers, "pin_memory": pin_memory,
        "prefetch": prefetch, "limit_train_rows": limit_train_rows,
    }  # fmt: skip
    if streaming:
        return StreamedData(node, shuffle_documents, head_shards(node, cache=Path(cache)), **loading)
    return TokenWindows(hub_prepared(node, cache=Path(cache)), **loading)


class StreamedData(TokenWindows):
    """Windows of rows that each rank packs out of its own share of the documents while it trains.

    `folder` holds what is scored, and the tokenizer. Its state is a position of each rank; it can only go on with as
    many ranks.
    """

    faster = "data.streaming=false tokenises it once, beforehand"

    def __init__(self, node: Mapping[str, Any], shuffle_documents: int, folder: Path, **loading: Any):
        self.node, self.shuffle_documents = node, shuffle_documents
        self.positions: dict[int, Position] = {}
        super().__init__(folder, **loading)

    def _open(self) -> None:
        self.manifest = read_manifest(self.folder)
        self.tokenizer = load_tokenizer(self.folder)
        self.held_out = set(json.loads((self.folder / HELD_OUT).read_text(encoding="utf-8")))

    @property
    def fingerprint(self) -> str:
        facts = [ORDER_VERSION, self.manifest["source_sha256"], self.manifest["tokenizer"], self.shuffle_documents]
        facts += [self.context, self.seed, self.plan.sequences]
        return hash_of(facts)[:16]

    def epochs(self, step: int) -> float:
        """Whole passes of this rank over its share."""
        return float(self.positions[step]["epoch"]) if step in self.positions else 0.0

    def position(self, step: int) -> Position:
        """Where this rank's documents are read up to after `step` updates."""
        return self.positions[step]

    def go_on(self, step: int, position: Any) -> None:
        """Begin where a checkpoint of `step` updates was."""
        self.positions = {step: read_position(position)}

    def train_dataloader(self) -> TimedLoader:
        rank, plan = self._share()
        first, last = self.start[0], self.start[0] + -(-(self.samples - self.start[1]) // plan.sequences)
        if first == 0:
            self.positions[0] = START
        if first not in self.positions:
            raise UsageError(
                f"resume: the checkpoint of step {first} does not hold where rank {rank} was in its stream"
            )
        stream = self._stream(rank, plan.dp, self.positions[first])
        windows = StreamedWindows(stream, plan, rank, range(first, last), self.positions)
        self.train_loader = TimedLoader(DataLoader(windows, batch_size=None, pin_memory=self.pin_memory))
        return self.train_loader

    def _stream(self, rank: int, world: int, position: Position) -> TokenStream:
        from datasets.distributed import split_dataset_by_node

        rows, tokenizer = open_rows(self.node), self.tokenizer
        assert tokenizer is not None

        def texts(rows: Iterator[Any]) -> Iterator[str]:
            found = documents(rows, self.node, Report(self.node["on_bad"] == "lenient"))
            return (d.text for d in found if text_hash(d.text) not in self.held_out)

        def encode(text: str) -> Integers:
            return tokenizer.document(next(tokenizer.encode_many([text]))).astype(np.int64)

        share = partial(split_dataset_by_node, rows, rank, world)
        stream = TokenStream(share, texts, encode, self.seed, self.shuffle_documents, position)
        atexit.register(stream.close)
        return stream


class StreamedWindows(IterableDataset[Window]):
    """The windows of `updates`, in order; notes in `positions` where the stream is after each."""

    def __init__(self, stream: TokenStream, plan: BatchPlan, rank: int, updates: range, positions: dict[int, Position]):
        self.stream, self.plan, self.rank, self.updates, self.positions = stream, plan, rank, updates, positions

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Window]:
        for update in self.updates:
            began = time.perf_counter()
            seed_streams(self.stream.seed, self.rank, update, 0)
            micro_batches = self._micro_batches()
            self.positions[update + 1] = self.stream.position
            self.positions.pop(update + 1 - KEPT, None)
            yield {
                "micro_batches": micro_batches,
                "targets": sum(int((batch["labels"] != IGNORED).sum()) for batch in micro_batches),
                "samples": self.plan.micro * self.plan.accumulation,
                "seconds": time.perf_counter() - began,
            }
        self.stream.close()

    def _micro_batches(self) -> list[dict[str, Any]]:
        plan = self.plan
        held = self.stream.take(plan.accumulation * plan.micro * plan.context)
        rows = PackedRows(held, plan.context)
        numbers = np.arange(len(rows)).reshape(plan.accumulation, plan.micro)
        return [rows.batch(row) for row in numbers]
