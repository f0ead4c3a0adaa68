"""One rank of a real training is killed in the middle of a save: a resumed run ends with the digits of a whole one."""

from functools import partial

import jobs
import pytest
from jobs import digits, train_on

from kills import die_saving
from lmforge.runs.folder import list_checkpoints
from ranks import run_ranks
from tiny import compose, new_run

slow = partial(pytest.param, marks=pytest.mark.slow)
WRITING, PUBLISHING, REMOVING = "weights-", "state.json", ".step-00000002.old"  # the last two are rank 0's alone


@pytest.mark.parametrize(
    ("strategy", "rank", "moment"),
    [
        ("ddp", 0, PUBLISHING),
        ("fsdp", 1, WRITING),
        slow("fsdp", 0, WRITING),
        slow("fsdp", 0, PUBLISHING),
        slow("fsdp", 0, REMOVING),
        slow("ddp", 1, "local-"),
        slow("ddp", 0, REMOVING),
    ],
)
def test_the_former_checkpoint_stands(shards, strategy, rank, moment) -> None:
    words = ("trainer.devices=2", "callbacks.checkpoint.every_n_steps=2", "model.dropout=0.1")
    plain = compose(shards, f"strategy={strategy}", *words)
    whole, killed = new_run(plain).path, new_run(plain).path
    train_on(2, plain, whole)
    with pytest.raises(AssertionError, match=f"rank {rank}: died with exit code -9"):
        run_ranks(jobs.unwatched, 2, plain, str(killed), partial(die_saving, rank, 4, moment), seconds=60)
    left = [path.name for path in list_checkpoints(killed / "checkpoints")]
    assert left == ["step-00000002", "step-00000004"][: 1 + (moment == REMOVING)]
    train_on(2, plain, killed)
    assert digits(killed) == digits(whole)
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step-00000006"]
