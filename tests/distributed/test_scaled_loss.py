"""16-mixed is float16 with a loss scaler also on a CPU; its scale and the count to its next growth are resumed."""

from functools import partial
from unittest.mock import patch

import jobs
import pytest
import torch
from jobs import Change, digits, last_checkpoint, stop_after, train_on

from fits import fit, killed
from lmforge.parallel.precision import ForwardPrecision
from lmforge.tasks.update import UpdateTask
from tiny import compose, metrics, new_run

GROWS = ("precision=16-mixed", "trainer.max_steps=16", "callbacks.checkpoint.every_n_steps=7")
slow = partial(pytest.param, marks=pytest.mark.slow)


def grow_every(steps: int) -> None:
    """The scale doubles after so few good steps that it soon is too large, again and again."""
    make = ForwardPrecision.__init__

    def quick(self: ForwardPrecision, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        self.scaler.set_growth_interval(steps)

    ForwardPrecision.__init__ = quick  # type: ignore[method-assign]


def forget_scale() -> None:
    ForwardPrecision.load_state_dict = lambda self, state: None  # type: ignore[method-assign]


@pytest.fixture
def growing():
    with patch.object(ForwardPrecision, "__init__", ForwardPrecision.__init__):
        grow_every(3)
        yield


@pytest.mark.parametrize("forget", [False, True])
def test_a_killed_run_ends_with_the_digits_of_one_that_was_not(shards, growing, forget) -> None:
    whole = fit(shards, *GROWS).folder
    scaler = last_checkpoint(whole).state["scaler"]
    assert 0 < last_checkpoint(whole).state["skipped"] < 8  # the scale was too large at times
    folder = killed(shards, *GROWS, step=9)
    assert last_checkpoint(folder).state["step"] == 7
    assert last_checkpoint(folder).state["scaler"]["_growth_tracker"] > 0
    load = (lambda self, state: None) if forget else ForwardPrecision.load_state_dict
    with patch.object(ForwardPrecision, "load_state_dict", load):
        fit(shards, *GROWS, folder=folder)
    same = digits(folder) == digits(whole) and last_checkpoint(folder).state["scaler"] == scaler
    assert same is not forget


def run_on_two(shards, strategy: str, *words: str, changes: list[list[Change]]):
    plain = compose(shards, *GROWS, f"strategy={strategy}", "trainer.devices=2", *words)
    folder = new_run(plain).path
    return folder, [train_on(2, plain, folder, partial(grow_every, 3), *some) for some in changes]


@pytest.mark.parametrize("strategy", ["fsdp", slow("ddp")])
def test_two_ranks_scale_alike_and_resume_exactly(shards, strategy) -> None:
    whole, (facts,) = run_on_two(shards, strategy, changes=[[]])
    skipped = [rank["skipped"] for rank in facts]
    assert skipped[0] == skipped[1] > 0
    stopped, _ = run_on_two(shards, strategy, changes=[[stop_after(9)], []])
    assert digits(stopped) == digits(whole)
    assert last_checkpoint(stopped).state["scaler"] == last_checkpoint(whole).state["scaler"]


@pytest.mark.parametrize("strategy", ["fsdp", slow("ddp")])
def test_a_loss_that_is_not_a_number_on_one_rank_is_no_search_for_the_scale(shards, strategy) -> None:
    words = ("trainer.nonfinite_patience=1", "trainer.max_steps=6")
    _, (searched,) = run_on_two(shards, strategy, *words, changes=[[partial(overflow_at, 1, 3)]])
    assert [(rank["stopped"], rank["skipped"]) for rank in searched] == [(None, 1)] * 2
    _, (lost,) = run_on_two(shards, strategy, *words, changes=[[partial(jobs.nan_at, 1, 3)]])
    assert [rank["stopped"] for rank in lost] == ["NonFinite"] * 2


def overflow_at(rank: int, step: int) -> None:
    """One rank's loss is finite, but its scaled gradient is too large for float16."""
    scaled, seed = ForwardPrecision.scaled, UpdateTask._seed
    now: dict[str, bool] = {}

    def noted(task: UpdateTask, number: int) -> None:
        now["here"] = task.global_rank == rank and number == step
        seed(task, number)

    def steep(self: ForwardPrecision, loss: torch.Tensor) -> torch.Tensor:
        return scaled(self, loss * 1e6 if now["here"] else loss)

    UpdateTask._seed, ForwardPrecision.scaled = noted, steep  # type: ignore[method-assign]


def test_it_really_is_float16(shards) -> None:
    """The losses differ from bfloat16's and float32's, and lie closer to float32's."""
    losses = {
        word: [row[1] for row in metrics(fit(shards, f"precision={word}", "trainer.max_steps=3").folder, "train/loss")]
        for word in ("32-true", "16-mixed", "bf16-mixed")
    }
    far = [
        max(abs(a - b) for a, b in zip(losses["32-true"], losses[w], strict=True)) for w in ("16-mixed", "bf16-mixed")
    ]
    assert 0 < far[0] < far[1] / 2
