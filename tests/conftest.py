"""Fixtures for all tests: a small corpus of token shards, and everything global put back afterwards."""

import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of the `make test` this may run below: not for the tests' own make
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environment, working folder, signal handlers, log level and random streams as they were before the test."""
    environment, handlers = dict(os.environ), {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LMFORGE_RUN", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ["WANDB_MODE"] = "offline"
    monkeypatch.chdir(tmp_path)
    streams = random.getstate(), np.random.get_state()
    log = logging.getLogger("lmforge")
    level = log.level
    yield
    log.setLevel(level)
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards: 60 train, 5 val and 2 test documents of 2 to 90 tokens that a network can learn."""
    from lmforge.data.shards import write_shards

    rng = np.random.default_rng(0)

    def document() -> np.ndarray:
        start, length = rng.integers(2, 60), rng.integers(2, 90)
        body = (start + np.arange(length - 2) * rng.integers(1, 4)) % 58 + 2
        return np.concatenate(([0], body, [1]))

    splits = {"train": 60, "val": 5, "test": 2}
    folder = tmp_path_factory.mktemp("shards") / "small"
    return write_shards(folder, {split: [document() for _ in range(n)] for split, n in splits.items()}, vocab_size=60)
