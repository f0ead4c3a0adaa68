"""Every target counts once and equally, wherever it lies: in an update and in an evaluation."""

from dataclasses import dataclass
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import train_on, weights

from lmforge.data.shards import write_shards
from ranks import run_ranks
from tiny import compose, compose_on, evaluate, new_run, train


def documents(*lengths: int) -> list[np.ndarray]:
    return [(np.arange(length) * (7 + number) + number) % 50 for number, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows of 10 tokens: one with 9 targets, one with a single target."""
    folder = tmp_path_factory.mktemp("uneven") / "shards"
    return write_shards(folder, {"train": documents(10, 2), "val": documents(10, 2)}, vocab_size=50)


def one_update(
    shards: Path, world: int, *changes: jobs.Change, strategy: str = "auto"
) -> tuple[Path, list[jobs.Facts]]:
    words = (
        f"strategy={strategy}",
        "model.n_kv_head=2",
        "model.context=10",
        "batch.sequences=2",
        "trainer.max_steps=1",
        "trainer.gradient_clip_val=null",
    )
    plain = compose(shards, *words, "optimizer.lr=1e-2", "optimizer.eps=1e-3", f"trainer.devices={world}")
    folder = new_run(plain).path
    return folder, train_on(world, plain, folder, *changes)


def furthest(folder: Path, other: Path) -> float:
    """The largest difference between any two weights of two runs."""
    theirs = weights(other)
    return max(float((value - theirs[name]).abs().max()) for name, value in weights(folder).items())


@pytest.mark.parametrize(
    ("strategy", "targets"), [("ddp", [1, 9]), ("fsdp", [1, 9]), ("tensor", [10, 10]), ("pipeline", [10, 10])]
)
def test_nine_targets_and_one(uneven, strategy, targets) -> None:
    """On two ranks that read a row each, and on two that share the work on both rows."""
    alone, (expected,) = one_update(uneven, 1)
    folder, facts = one_update(uneven, 2, strategy=strategy)
    assert sorted(rank["targets"][0] for rank in facts) == targets
    assert furthest(folder, alone) < 1e-6
    assert [rank["logged_loss"] for rank in facts] == pytest.approx([expected["logged_loss"]] * 2, abs=1e-6)


def test_the_mean_of_the_ranks_means_is_noticed(uneven) -> None:
    alone, _ = one_update(uneven, 1)
    wrong, _ = one_update(uneven, 2, jobs.mean_of_means)
    assert furthest(wrong, alone) > 1e-4


@dataclass
class Scored:
    """A trained run whose few validation documents differ much in length and loss."""

    folder: Path
    documents: int
    targets: int


@pytest.fixture(scope="module", params=[5, 7])
def scored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    root = tmp_path_factory.mktemp("scored")
    lengths = [33, 9, 65, 2, 40, 21, 3][: request.param]
    split = {"train": documents(*[40] * 12), "val": documents(*lengths)}
    shards = write_shards(root / "shards", split, vocab_size=60)
    words = ("trainer.max_steps=3", "optimizer.lr=1e-2", "model.n_kv_head=2", f"paths.root={root}")
    plain = compose(shards, *words)
    folder = new_run(plain).path
    train(plain, folder)
    return Scored(folder, request.param, sum(lengths) - request.param)


@pytest.mark.parametrize("strategy", ["ddp", "tensor", "context", "pipeline"])
def test_an_evaluation_counts_each_target_once(scored, strategy) -> None:
    """Batches of one row on two ranks, one of which runs out of rows first, against one process with larger ones."""
    folder, double = scored.folder, "precision=64-true"
    alone = evaluate(compose_on("evaluate", folder, "trainer.threads=1", double, "batch_sequences=4"), folder)
    spread = ("trainer.devices=2", *f"strategy={strategy}".split())
    plain = compose_on("evaluate", folder, "trainer.threads=1", double, "batch_sequences=1", *spread)
    for result in [alone, *run_ranks(evaluate, 2, plain, folder)]:
        assert (result["targets"], result["documents"]) == (scored.targets, scored.documents)
        for name in ("loss", "accuracy", "ece"):
            assert result[name] == pytest.approx(alone[name], rel=1e-9), name
