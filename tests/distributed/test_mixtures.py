"""A mixture in whole runs: the same rows on any number of ranks, also after a stop, and validation by source."""

import jobs
import numpy as np
import pytest
from jobs import Facts, stop_after, train_on

from fits import fit, score
from lmforge.data.shards import write_shards
from tiny import compose, metrics, new_run

WORDS = ("data=mix", "batch.sequences=6", "batch.micro_sequences=1", "trainer.max_steps=9", "precision=64-true")
COLUMNS = ("train/loss", "val/loss", "val/few/loss", "val/more/loss", "data/few/share", "data/more/epochs")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two sources of 12 and 4 rows, in shares of 2 and 1: after 54 rows one was read three times, the other 4.5."""
    rng, typed = np.random.default_rng(1), []
    for name, documents, weight in (("few", 6, 2), ("more", 2, 1)):
        splits = {
            split: [rng.integers(2, 60, 64) for _ in range(count)]
            for split, count in (("train", documents), ("val", 2))
        }
        folder = write_shards(tmp_path_factory.mktemp("mix") / name, splits, vocab_size=60)
        typed += [f"data.sources.{name}.path={folder}", f"data.sources.{name}.weight={weight}"]
    return (*WORDS, *typed)


def rows(starts: list[list[Facts]]) -> list[list[int]]:
    """The rows of every update, over all ranks of all starts."""
    found: dict[int, list[int]] = {}
    for facts in starts:
        for rank in facts:
            for update, mine in rank["rows"].items():
                found.setdefault(update, []).extend(mine)
    return [sorted(found[update]) for update in sorted(found)]


def test_stopped_on_one_rank_and_resumed_on_two(words, monkeypatch) -> None:
    settings = compose(None, *words, "trainer.val_every_n_steps=3")
    whole, parted = new_run(settings).path, new_run(settings).path
    expected = rows([train_on(1, settings, whole)])
    assert len(expected) == 9
    first = train_on(1, settings, parted, stop_after(4))
    assert rows([first, train_on(2, compose(None, *words, "strategy=ddp"), parted)]) == expected
    for ours, theirs in zip(metrics(parted, *COLUMNS[:1]), metrics(whole, *COLUMNS[:1]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)
    every = [row for batch in expected for row in batch]
    assert (np.bincount(every)[:12] == 3).all()  # 36 of 54 rows come from the first source's 12, three times each
    assert sorted(np.bincount(every)[12:]) == [4, 4, 5, 5]

    forgetful = new_run(settings).path
    first = train_on(1, settings, forgetful, stop_after(4))
    again = train_on(2, compose(None, *words, "strategy=ddp"), forgetful, jobs.forget_position)
    assert rows([first, again]) != expected


def test_validation_is_logged_by_source_and_the_shares_beside(words) -> None:
    run = fit(None, *words)
    *_, last = metrics(run.folder, *COLUMNS)
    step, _, loss, few, more, share, epochs = last
    assert (step, share) == (9.0, pytest.approx(2 / 3))
    assert epochs == 54 / 3 / 4
    assert loss == pytest.approx((few + more) / 2)  # both have as many targets
    assert few != more
    assert run.summary["data/few/epochs"] == 3.0
    assert run.summary["val/few/loss"] == few


def test_few_validation_batches_are_of_all_sources(words) -> None:
    run = fit(None, *words, "trainer.limit_val_batches=2", "trainer.max_steps=1")
    assert sorted(run.task.by_source) == ["few", "more"]


def test_the_sources_are_found_again_by_name(words) -> None:
    run = fit(None, *words, "trainer.max_steps=2", "data.tokenizer=null")
    report = score(run.folder, "precision=64-true")
    assert report["few/loss"] == pytest.approx(run.task.latest["val/few/loss"], rel=1e-9)
    assert report["data"] == "few+more"
