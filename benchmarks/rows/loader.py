"""Waiting for data in the default run, and windows against the plain way to get a batch."""

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks import contest, corpus, nanogpt, product
from benchmarks.report import Row, verdict
from benchmarks.settings import Settings
from lmforge.config.batch import BatchPlan
from lmforge.config.layout import Layout
from lmforge.data.module import TokenWindows
from lmforge.training.assemble import keep_memory

MOST_SHARE, LEAST = 0.001, 10.0
SIZES = ((12, 64), (8, 256))  # sequences, context


def rows(settings: Settings) -> list[Row]:
    shards = corpus.byte_shards(settings.folder / "bytes", settings.pick(4.0, 0.3))
    return [_waiting(settings), *(_loader(shards, *size, settings) for size in SIZES)]


def _waiting(settings: Settings) -> Row:
    cache = settings.folder / "cache"
    every = settings.pick(50, 5)
    words = [f"paths.cache={cache}", "callbacks.checkpoint.every_n_steps=1000000"]
    words += settings.pick([], ["data=text", f"data.path={product.ROOT / 'README.md'}", "data.vocab_size=300"])
    lanes = contest.compete(
        {"LMForge": (product.fit, {"words": words, "every": every})}, 4, 1, settings.folder / "wait"
    )
    lane = lanes["LMForge"]
    built = [said["built"] for said in lane.said]
    share = (built[-1] - built[0]) / sum(lane.seconds[1:])
    return Row(
        "waiting for data, default run",
        "<= 0.1 % of a step",
        f"{share:.3%} ({1e6 * (built[-1] - built[0]) / (every * (len(built) - 1)):.0f} us a step)",
        verdict(share <= MOST_SHARE),
        {"share": share, "step_seconds": lane.best / every},
    )


def _loader(shards: Path, batch: int, context: int, settings: Settings) -> Row:
    keep_memory()
    torch.set_num_threads(1)
    data = TokenWindows(shards, context=context)
    data.connect(BatchPlan(batch, batch, 1, Layout(), 1, 1, context), seed=0, samples=10**9)
    windows: Any = iter(data.train_dataloader())
    tokens = np.memmap(shards / "train-00000.tokens", dtype="<u2", mode="r")
    count = settings.pick(512, 64)
    ways: dict[str, Callable[[], Any]] = {
        "get_batch": lambda: nanogpt.get_batch(tokens, batch, context),
        "LMForge": lambda: next(windows),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(settings.pick(9, 2)):
        for name, way in ways.items():
            began = process_time()
            for _ in range(count):
                way()
            times[name].append((process_time() - began) / count)
    ratio = contest.Ratio.of(times["get_batch"], times["LMForge"])
    return Row(
        f"loader, {batch} x {context} tokens",
        ">= 10x nanoGPT's get_batch",
        f"{ratio}x; {1e6 * min(times['LMForge']):.0f} us against {1e6 * min(times['get_batch']):.0f} us a batch",
        verdict(ratio.best >= LEAST),
        {"ratio": vars(ratio), "seconds": {name: min(t) for name, t in times.items()}},
    )
