"""The data module: loaders for any rank and step, its fingerprint, and what it refuses."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from builders import batch_plan, packed
from lmforge.config.errors import UsageError
from lmforge.config.plain import to_config
from lmforge.data.module import TimedLoader, TokenData, TokenWindows
from lmforge.data.packing import IGNORED
from lmforge.data.shards import write_shards
from lmforge.training.assemble import make_data, make_network
from tiny import compose


def opened(
    folder: Path, sequences: int = 4, seed: int = 0, world: int = 1, micro: int = 1, **loading: Any
) -> TokenWindows:
    data = TokenWindows(folder, **{"context": 32, **loading})
    data.connect(batch_plan(sequences, micro, world, context=32), seed, samples=3 * len(data.train))
    return data


def as_rank(data: TokenWindows, rank: int, world: int) -> TokenWindows:
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world)  # type: ignore[assignment]
    return data


def test_scoring_shows_every_target_once_for_any_batch_and_ranks(shards) -> None:
    counts = []
    for world, micro in [(1, 1), (1, 3), (1, 100), (2, 1), (3, 2)]:
        loaders = [as_rank(opened(shards, micro=micro), rank, world).scoring_loader("val") for rank in range(world)]
        assert len({len(loader) for loader in loaders}) == 1
        counts.append(sum(window["targets"] for loader in loaders for window in loader))
    rows = opened(shards).rows("val").shards
    assert set(counts) == {rows.n_tokens - rows.n_documents}


def test_a_real_world_of_another_size_than_planned_gets_the_same_global_batch(shards) -> None:
    def targets(world: int, lost: int = 0) -> list[int]:
        ranks = range(lost, world)
        streams = [as_rank(opened(shards, sequences=6), rank, world).train_dataloader() for rank in ranks]
        return [sum(window["targets"] for window in step) for step in zip(*streams, strict=True)]

    assert targets(1) == targets(2) == targets(4)
    assert targets(1) != targets(4, lost=1)


def test_the_fingerprint_names_what_decides_the_order_and_nothing_else(shards, tmp_path) -> None:
    packed(tmp_path / "other", [list(range(300))], 32)
    base = opened(shards).fingerprint
    same = [opened(shards, num_workers=2), opened(shards, world=2), opened(shards, pin_memory=True)]
    other = [
        opened(tmp_path / "other"),
        opened(shards, seed=1),
        opened(shards, sequences=8),
        opened(shards, context=16),
        opened(shards, limit_train_rows=5),
    ]
    assert {data.fingerprint for data in same} == {base}
    assert len({base, *(data.fingerprint for data in other)}) == 6


def test_epochs_count_passes_over_the_rows(shards) -> None:
    data = opened(shards)
    assert data.epochs(0) == 0
    assert data.epochs(5) == pytest.approx(20 / len(data.train))
    assert data.epochs(10**6) == 3  # the samples of the whole run are three passes


def test_no_training_target_at_all_is_an_error(tmp_path) -> None:
    with pytest.raises(UsageError, match="train split holds no target"):
        packed_data(tmp_path / "s", [[1]])


def packed_data(folder: Path, documents: list[list[int]]) -> TokenWindows:
    packed(folder, documents, 32)
    return TokenWindows(folder, context=32)


def test_a_split_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path) -> None:
    packed_data(tmp_path / "s", [list(range(100))])
    data = opened(tmp_path / "s")
    assert data.val_dataloader() == []
    with pytest.raises(UsageError, match=r"split=test.*it has train"):
        data.scoring_loader("test")


def config(folder: Path, cache: Path, rows: int | None) -> Any:
    data = {"_target_": "lmforge.data.module.TokenData", "path": str(folder), "context": 8}
    return OmegaConf.create({"data": data, "model": {"vocab_size": rows}, "paths": {"cache": str(cache)}})


def test_ids_beyond_the_models_rows_are_refused_with_both_numbers(tmp_path) -> None:
    """A tokenizer of 2000 base ids and three added ones needs 2003 rows."""
    folder = write_shards(tmp_path / "s", {"train": [np.array([2000, 2002, 5])]}, vocab_size=2003)
    with pytest.raises(UsageError, match="2003 > 2000"):
        make_data(config(folder, tmp_path, rows=2000))
    for enough in (2003, 2048, None):
        assert isinstance(make_data(config(folder, tmp_path, enough)), TokenData)


def test_a_model_without_a_size_of_its_own_gets_the_tokenizers_padded_to_64(shards) -> None:
    cfg = to_config(compose(shards))
    assert [make_network(cfg, size).vocab_size for size in (60, 64, 2003)] == [64, 64, 2048]


def test_the_loader_adds_up_waiting_building_and_samples(monkeypatch) -> None:
    ticks = iter([0.0, 2.0, 10.0, 11.0, 20.0, 20.5])
    monkeypatch.setattr("lmforge.data.module.time.perf_counter", lambda: next(ticks))
    loader = TimedLoader([{"seconds": 0.25, "samples": 4}, {"seconds": 0.5, "samples": 2}])  # type: ignore[arg-type]
    assert len(list(loader)) == 2
    assert (loader.wait_seconds, loader.build_seconds, loader.samples) == (3.5, 0.75, 6)


def test_labels_of_padding_are_ignored(shards) -> None:
    last = list(opened(shards, micro=3).scoring_loader("val"))[-1]["micro_batches"][0]
    assert (last["labels"][-1] == IGNORED).any()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_outlives_a_signal_to_its_process_group(shards, number) -> None:
    loader = opened(shards, num_workers=1).train_dataloader().loader
    windows = iter(loader)
    next(windows)
    (worker,) = windows._workers
    send = os.fork()
    if send == 0:  # the signal must come from anybody but the worker's parent
        os.kill(worker.pid, number)
        os._exit(0)
    os.waitpid(send, 0)
    assert len(list(windows)) == len(loader) - 1
    assert worker.exitcode == 0


def test_a_worker_still_ends_when_its_parent_says_so(shards) -> None:
    windows = iter(opened(shards, num_workers=1).train_dataloader().loader)
    (worker,) = windows._workers
    next(windows)
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
