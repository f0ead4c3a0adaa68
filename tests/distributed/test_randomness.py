"""Random numbers differ between ranks, workers and steps, and are the same again for the same seed."""

from pathlib import Path

import jobs
import pytest
from jobs import Facts, train_on

from lmforge.data.shards import read_manifest
from tiny import compose, new_run


def drawn(shards: Path, *words: str) -> list[Facts]:
    common = (
        "strategy=ddp",
        "trainer.devices=2",
        "batch.sequences=4",
        "batch.micro_sequences=1",
        "trainer.max_steps=8",
    )
    plain = compose(shards, *common, "data.limit_train_rows=16", *words)
    return train_on(2, plain, new_run(plain).path, jobs.random_rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_two_draws_are_alike(shards, workers) -> None:
    """Two epochs on two ranks, with two loader workers each: every row and every step gets numbers of its own."""
    facts = drawn(shards, f"data.num_workers={workers}")
    rows = [draw for rank in facts for draw in rank["row_draws"]]
    steps = [draw for rank in facts for draw in rank["draws"].values()]
    assert len(rows) == 32
    assert len(steps) == 16
    for stream in zip(*rows, strict=True):
        assert len(set(stream)) == 32
    for stream in zip(*steps, strict=True):
        assert len(set(stream)) == 16


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_seed_repeats_them(shards, workers) -> None:
    """And another seed gives others; the number of loader workers decides nothing."""
    first, again, other = drawn(shards), drawn(shards, f"data.num_workers={workers}"), drawn(shards, "seed=1")
    for name in ("row_draws", "draws"):
        assert [rank[name] for rank in first] == [rank[name] for rank in again]
        assert all(rank[name] != different[name] for rank, different in zip(first, other, strict=True))


def test_all_ranks_split_the_documents_alike(tmp_path, shards) -> None:
    """Two ranks prepare the same text at the same moment; train and val never meet; a resume finds the same split."""
    for number in range(40):
        text = " ".join(f"word{number * 31 % 17}x{number * place}" for place in range(60))
        (tmp_path / f"{number}.txt").write_text(text)
    words = ("data=text", f"data.path={tmp_path}/*.txt", "data.vocab_size=300", "strategy=ddp", "trainer.devices=2")
    plain = compose(shards, *words)
    folder = new_run(plain).path
    facts = train_on(2, plain, folder, jobs.stop_after(3)) + train_on(2, plain, folder)
    (shards_folder,) = {rank["data"] for rank in facts}
    assert jobs.last_checkpoint(folder).state["split"] == read_manifest(Path(shards_folder))["split_sha256"]
