"""A run that was killed and resumed equals one that was not, to the last digit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fits import After, fit, killed
from lmforge.config.errors import UsageError
from lmforge.tasks.update import UpdateTask
from lmforge.training import resume
from lmforge.training.checkpoint import Checkpoint, PieceReader, list_checkpoints
from lmforge.training.csvlog import read_rows

TEN = ("trainer.max_steps=10", "model.dropout=0.1", "schedule=cosine", "callbacks.checkpoint.every_n_steps=5")
CASES = {
    "adamw": (),
    "muon": ("optimizer=muon",),
    "accumulation": ("batch.micro_sequences=2",),
    "log interval across the checkpoint": ("trainer.log_every_n_steps=4",),
    "validation at the checkpoint": ("trainer.val_every_n_steps=5",),
    "validation elsewhere": ("trainer.val_every_n_steps=3", "trainer.log_every_n_steps=3"),
}


def rows(folder: Path) -> list[dict[str, str]]:
    """The log without what depends on how busy the machine is."""
    return [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in read_rows(folder / "metrics.csv")]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint: weights, optimizer state and metric sums."""
    reader = PieceReader(sorted(list_checkpoints(folder / "checkpoints")[-1].glob("*.safetensors")))
    return {name: reader.read(name) for name in reader.names()}


def differences(a: Path, b: Path) -> list[str]:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not ours[name].equal(theirs[name])]
    return [*differing, *(["metrics.csv"] if rows(a) != rows(b) else [])]


def killed_and_resumed(shards: Path, *words: str, step: int = 7) -> Path:
    folder = killed(shards, *words, step=step)
    assert Checkpoint(list_checkpoints(folder / "checkpoints")[-1]).step in (5, 6)
    fit(shards, *words, folder=folder)
    return folder


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(shards, *TEN, f"paths.root={tmp_path_factory.mktemp('whole')}").folder


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_the_last_digit(shards, words) -> None:
    whole = fit(shards, *TEN, *words).folder
    resumed = killed_and_resumed(shards, *TEN, *words)
    assert differences(whole, resumed) == []
    assert [row["step"] for row in rows(resumed)] == [row["step"] for row in rows(whole)]


def test_killed_right_at_the_checkpoint(shards, whole) -> None:
    assert differences(whole, killed_and_resumed(shards, *TEN, step=5)) == []


def forget_moments(*args: Any) -> None:
    """Mutation: the optimizer starts anew."""


def forget_tokens(self: UpdateTask, state: dict[str, Any]) -> None:
    """Mutation: counters start anew."""


@pytest.mark.parametrize(
    ("owner", "name", "mutation"),
    [
        (resume, "load_optimizers", forget_moments),
        (UpdateTask, "load_state", forget_tokens),
        (UpdateTask, "_seed", lambda self, step: None),
    ],
    ids=["optimizer", "counters", "random streams"],
)
def test_what_is_forgotten_is_noticed(shards, whole, owner, name, mutation) -> None:
    folder = killed(shards, *TEN, step=7)
    with patch.object(owner, name, mutation):
        fit(shards, *TEN, folder=folder)
    assert differences(whole, folder) != []


def test_lost_metric_sums_are_noticed(shards) -> None:
    words = (*TEN, "trainer.log_every_n_steps=4")
    whole = fit(shards, *words).folder
    with patch.object(resume, "load_local", lambda *args: None):
        assert differences(whole, killed_and_resumed(shards, *words)) == ["metrics.csv"]


def test_a_run_told_to_stop_between_two_log_writes_has_the_same_rows_after_it_goes_on(shards) -> None:
    words = (*TEN, "trainer.log_every_n_steps=4")
    whole = fit(shards, *words).folder

    def ask(trainer: Any, task: UpdateTask) -> None:
        task.requests["terminate"] = lambda: 1

    with pytest.raises(Exception, match="stopped at step 6"):
        fit(shards, *words, also=(After(5, ask),))
    (folder,) = (path for path in Path("runs/default").iterdir() if path.name != whole.name)
    fit(shards, *words, folder=folder)
    assert rows(folder) == rows(whole)


def test_a_longer_horizon_follows_the_new_schedule_and_says_so(shards, capsys) -> None:
    words = ("schedule=linear", "schedule.final=0", "schedule.warmup=0", "optimizer.lr=0.01")
    run = fit(shards, *words, "trainer.max_steps=5")
    fit(shards, *words, "trainer.max_steps=9", folder=run.folder)
    rates = {int(row["step"]): float(row["train/lr"]) for row in rows(run.folder)}
    assert rates[5] == 0.0
    assert [rates[step] for step in range(6, 10)] == pytest.approx([0.01 * (9 - step) / 8 for step in range(6, 10)])
    assert "5 -> 9 steps; rate at step 5: 0 -> 0.5 of the peak" in capsys.readouterr().err


def test_other_data_or_another_seed_are_refused(shards) -> None:
    folder = killed(shards, *TEN, step=6)
    for word in ("seed=1", "model.context=16", "batch.sequences=4"):
        with pytest.raises(UsageError, match="the data are not those of"):
            fit(shards, *TEN, word, folder=folder)


def test_weights_of_another_run_start_a_new_one(shards) -> None:
    first = fit(shards, "trainer.max_steps=3")
    started: dict[str, torch.Tensor] = {}
    clip = UpdateTask._clip

    def note(task: UpdateTask) -> torch.Tensor:
        if task.global_step == 0:
            started.update({name: p.detach().clone() for name, p in task.network.named_parameters()})
        return clip(task)

    with patch.object(UpdateTask, "_clip", note):
        second = fit(shards, "trainer.max_steps=2", "seed=5", f"weights={first.folder}")
    last = tensors(first.folder)
    assert all(value.equal(last[name]) for name, value in started.items())
    assert second.summary["steps"] == 2
    assert [row["step"] for row in rows(second.folder)] == ["1", "2"]


def test_a_resume_survives_a_broken_newest_checkpoint(shards, whole, capsys) -> None:
    folder = killed(shards, *TEN, "callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.keep_last=2", step=8)
    broken = folder / "checkpoints" / "step-00000006"
    (broken / "weights-00000.safetensors").write_bytes(b"")
    fit(shards, *TEN, folder=folder)
    assert differences(whole, folder) == []
    assert str(broken) in capsys.readouterr().err
