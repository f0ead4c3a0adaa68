"""A run that was killed and resumed equals one that was not, to the last digit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from fits import After, fit, killed
from lmforge.config.errors import UsageError
from lmforge.parallel.control import Control
from lmforge.parallel.parallel import Parallel
from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows
from lmforge.tasks.metrics import TokenMetrics
from lmforge.tasks.update import UpdateTask
from lmforge.training import resume
from lmforge.training.checkpoint import Checkpoint, Piece, PieceReader, write_pieces
from lmforge.training.checkpointing import CheckpointCallback
from lmforge.training.rank_state import RankState
from lmforge.training.samples import Samples

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
    with patch.object(RankState, "load", lambda *args: None):
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


VALIDATED = (
    *TEN,
    "trainer.val_every_n_steps=3",
    "callbacks.early_stopping.monitor=val/loss",
    "callbacks.early_stopping.patience=2",
    "callbacks.early_stopping.min_delta=100",
)


def stopped_at_a_validation(shards: Path) -> Path:
    """A run that is told to stop in the update before its second validation, after which early stopping has waited."""
    before = set(Path("runs/default").glob("*"))

    def ask(trainer: Any, task: UpdateTask) -> None:
        task.requests["terminate"] = lambda: 1

    with pytest.raises(Exception, match="stopped at step 6 and saved"):
        fit(shards, *VALIDATED, also=(After(5, ask),))
    (folder,) = set(Path("runs/default").glob("*")) - before
    return folder


def test_a_run_told_to_stop_where_a_validation_is_due_saves_its_outcome(shards) -> None:
    whole = fit(shards, *VALIDATED)
    assert (whole.summary["steps"], whole.summary["reason"]) == (9, "early_stopping")
    folder = stopped_at_a_validation(shards)
    (last,) = list_checkpoints(folder / "checkpoints")[-1:]
    state = Checkpoint(last).state
    assert state["step"] == 6
    assert state["metrics"]["val/loss"] > 0
    assert state["callbacks"]["EarlyStop"]["waited"] == 1
    resumed = fit(shards, *VALIDATED, folder=folder)
    assert differences(whole.folder, folder) == []
    assert resumed.summary["reason"] == "early_stopping"


def test_a_save_before_that_validation_that_stays_is_noticed(shards, monkeypatch) -> None:
    save = CheckpointCallback.save
    monkeypatch.setattr(CheckpointCallback, "save", lambda self, trainer, task, scored=True: save(self, trainer, task))
    folder = stopped_at_a_validation(shards)
    assert Checkpoint(list_checkpoints(folder / "checkpoints")[-1]).state["metrics"] == {}


def resumed_sums(checkpoint: Checkpoint, rank: int, world: int) -> TokenMetrics:
    metrics = TokenMetrics()
    RankState(checkpoint, rank, world).load(metrics, Parallel(nn.Linear(1, 1)), print)
    return metrics


@pytest.fixture
def stored(shards) -> Checkpoint:
    """Of one rank, taken between two log writes."""
    folder = killed(shards, *TEN, "trainer.log_every_n_steps=4", step=6)
    return Checkpoint(list_checkpoints(folder / "checkpoints")[-1])


def test_every_rank_of_another_world_has_sums_to_compute(stored) -> None:
    """To compute them is a collective, and a metric that was never updated takes no part."""
    sums = [resumed_sums(stored, rank, 2) for rank in range(2)]
    assert [metrics.update_called for metrics in sums] == [True, True]
    assert int(sums[0].targets) > 0
    assert int(sums[1].targets) == 0


def test_sums_of_a_stranger_are_refused(stored) -> None:
    stored.state["world_size"] = 1000
    with pytest.raises(UsageError, match=r"state\.json does not name local-00001\.safetensors"):
        resumed_sums(stored, 0, 1)
    stored.state["world_size"] = 1
    for name, value in (("train/__class__", torch.tensor(1)), ("train/loss", torch.ones(3)), ("else", torch.ones(3))):
        shape = tuple(value.shape)
        write_pieces(stored.folder, "local", 0, {name: Piece(value, (0,) * value.dim(), shape)})
        with pytest.raises(UsageError, match="is nothing that this version keeps"):
            resumed_sums(stored, 0, 1)


class Counting(pl.Callback):
    """Counts steps, over all processes of a run."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    @property
    def state_key(self) -> str:
        return self.name

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_two_callbacks_of_one_class_keep_their_own_states(shards) -> None:
    words = ("trainer.max_steps=4", "callbacks.checkpoint.every_n_steps=1")
    first, second = Counting("a"), Counting("b")
    second.count = 10
    run = fit(shards, *words, also=(first, second))
    again = (Counting("a"), Counting("b"))
    fit(shards, *words, "trainer.max_steps=6", folder=run.folder, also=again)
    assert [callback.count for callback in again] == [6, 16]


def test_the_count_of_samples_is_the_runs() -> None:
    assert Samples(2, "x", 1, 0.0, 0).state_dict() == {"validations": 0}
    sample = Samples(2, "x", 1, 0.0, 0)
    sample.load_state_dict({"validations": 3})
    assert sample.validations == 3


def test_ranks_that_found_different_checkpoints_end_before_they_train(shards) -> None:
    elsewhere = patch.object(Control, "gather", lambda self, number: [number, number + 5])
    with elsewhere, pytest.raises(RuntimeError, match=r"different checkpoints, by rank at step \[0, 5\]"):
        fit(shards)


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
