"""The next-token task in real runs: accumulation, where the shift happens, what is logged and counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fits import After, fit, score
from lmforge.data.shards import write_shards
from lmforge.tasks.causal_lm import CausalLM
from lmforge.tasks.update import UpdateTask
from lmforge.training import assemble
from tiny import metrics

TWENTY = ("trainer.max_steps=20", "batch.sequences=4", "trainer.gradient_clip_val=null")


def third_gradients(shards: Path, *words: str) -> dict[str, Tensor]:
    """Of the third update: in the first one the blocks are still the identity and most gradients zero."""
    kept: dict[str, Tensor] = {}
    clip = UpdateTask._clip

    def noted(task: UpdateTask) -> Tensor:
        kept.update({name: p.grad.clone() for name, p in task.network.named_parameters()})
        return clip(task)

    with patch.object(UpdateTask, "_clip", noted):
        fit(shards, *TWENTY, "trainer.max_steps=3", "optimizer.eps=1e-3", *words)
    assert all(gradient.count_nonzero() for gradient in kept.values())
    return kept


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture
def mean_of_means() -> Iterator[None]:
    """Mutation: every micro-batch weighs the same, however few targets it has."""

    def accumulate(self: UpdateTask, batches: list[dict[str, Tensor]], targets: int) -> list[Any]:
        counted = [self.count(batch) for batch in batches]
        for counts in counted:
            (counts.loss / counts.targets / len(batches)).backward()
        return [c._replace(loss=c.loss.detach() / c.targets * targets / len(batches)) for c in counted]

    with patch.object(UpdateTask, "_accumulate", accumulate):
        yield


def test_four_micro_batches_of_one_have_the_gradient_of_one_of_four(shards) -> None:
    assert furthest(*(third_gradients(shards, f"batch.micro_sequences={n}") for n in (1, 4))) < 1e-6


def test_a_mean_of_means_has_another_gradient(shards, mean_of_means) -> None:
    assert furthest(*(third_gradients(shards, f"batch.micro_sequences={n}") for n in (1, 4))) > 1e-4


def curve(shards: Path, micro: int) -> list[tuple[float, ...]]:
    run = fit(shards, *TWENTY, f"batch.micro_sequences={micro}")
    return metrics(run.folder, "train/loss")


def test_twenty_logged_losses_do_not_depend_on_accumulation(shards) -> None:
    rows = [curve(shards, micro) for micro in (1, 2, 4)]
    assert len(rows[0]) == 20
    for a, b, c in zip(*rows, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
        assert a == pytest.approx(c, abs=1e-5)


def test_twenty_losses_of_a_mean_of_means_do(shards, mean_of_means) -> None:
    assert any(abs(a[1] - b[1]) > 1e-4 for a, b in zip(curve(shards, 1), curve(shards, 4), strict=True))


def test_the_logged_loss_is_the_token_mean_of_the_whole_update(shards) -> None:
    """From the first update's own rows and starting weights, by plain PyTorch."""
    first: list[float] = []
    accumulate = UpdateTask._accumulate

    def by_hand(task: UpdateTask, batches: list[dict[str, Tensor]], targets: int) -> Any:
        rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        with torch.no_grad():
            logits = task.network(rows["input_ids"], rows["doc_ids"], rows["positions"])
        first.append(float(F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten())))
        return accumulate(task, batches, targets)

    with patch.object(UpdateTask, "_accumulate", by_hand):
        run = fit(shards, *TWENTY, "trainer.max_steps=3", "batch.micro_sequences=1")
    assert [row[1] for row in metrics(run.folder, "train/loss")] == pytest.approx(first, abs=1e-5)


def test_four_updates_of_eight_micro_batches_are_four_steps_of_the_schedule(shards, monkeypatch) -> None:
    read: list[int] = []
    count = CausalLM.count
    monkeypatch.setattr(CausalLM, "count", lambda task, batch: read.append(task.training) or count(task, batch))
    wsd = ("schedule=wsd", "schedule.warmup=0", "schedule.decay=0.5", "schedule.final=0.1", "optimizer.lr=0.01")
    run = fit(shards, *wsd, "trainer.max_steps=4", "batch.micro_sequences=1")
    assert (run.summary["steps"], sum(read)) == (4, 32)
    rates = [row[1] for row in metrics(run.folder, "train/lr")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.01
    assert rates[-1] == pytest.approx(0.001, rel=0.01)


class Successor(nn.Module):
    """Is almost certain that token `id + step` (of ten) follows `id`; its one weight is the certainty."""

    block_class = nn.Identity
    context = 16

    def __init__(self, step: int):
        super().__init__()
        self.step = step
        self.certainty = nn.Parameter(torch.empty(1))

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.full(shape, 30.0)

    def flops_per_token(self, time: int) -> float:
        return 1.0

    def forward(self, input_ids: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        return self.certainty * F.one_hot((input_ids + self.step) % 10, 10)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    digits = np.tile(np.arange(10), 12)
    return write_shards(tmp_path_factory.mktemp("d") / "s", {"train": [digits, digits[3:]], "val": [digits]}, 10)


@pytest.mark.parametrize(("step", "right"), [(1, True), (0, False), (2, False)])
def test_labels_are_shifted_exactly_once_everywhere(counting, monkeypatch, step, right) -> None:
    monkeypatch.setattr(assemble, "make_network", lambda cfg, size: Successor(step))
    words = ("model.context=16", "optimizer.lr=1e-6", "callbacks.samples=null", "trainer.max_steps=2")
    run = fit(counting, *words)
    evaluated = score(run.folder)
    losses = [metrics(run.folder, "train/loss")[0][1], run.summary["val/loss"], evaluated["loss"]]
    if right:
        assert max(losses) < 1e-3
        assert run.summary["val/accuracy"] == evaluated["accuracy"] == 1.0
        assert evaluated["ece"] < 1e-3
    else:
        assert min(losses) > 10.0
        assert run.summary["val/accuracy"] == evaluated["accuracy"] == 0.0
        assert evaluated["ece"] > 0.99


LABELS = torch.tensor([[1, 1, 3, -100]])


def test_bits_per_byte_counts_the_bytes_of_the_targets() -> None:
    task = CausalLM.__new__(CausalLM)
    nn.Module.__init__(task)
    task.token_bytes = torch.tensor([0, 1, 2, 30])
    task.eval()
    logits = F.one_hot(torch.tensor([1, 2, 3, 3]), 4).float()
    scores = task._score(logits, torch.tensor([1, 1, 3, -100]))
    assert [int(values.sum()) for values in (scores.counted, scores.correct, scores.bytes)] == [3, 2, 1 + 1 + 30]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_token_is_scored_as_a_softmax_would(dtype) -> None:
    task = CausalLM.__new__(CausalLM)
    nn.Module.__init__(task)
    task.token_bytes = None
    logits = (4 * torch.randn(50, 9, generator=torch.Generator().manual_seed(3))).to(dtype)
    labels = torch.arange(50) % 9
    labels[::7] = -100
    scores = task._score(logits, labels)
    p = torch.softmax(logits.double(), dim=-1)
    counted = labels != -100
    expected = -p[torch.arange(50), labels.clamp(min=0)].log() * counted
    assert scores.loss.dtype == torch.float64
    assert torch.allclose(scores.loss, expected, atol=1e-5)
    assert torch.allclose(scores.confidence[counted], p.amax(dim=-1)[counted], atol=1e-5)
    assert scores.confidence.max() <= 1.0
    assert scores.correct.equal((p.argmax(dim=-1) == labels) & counted)


def test_a_nan_in_the_middle_leaves_the_weights_of_the_step_before(shards) -> None:
    count = CausalLM.count
    weights: dict[int, Tensor] = {}

    def poisoned(task: CausalLM, batch: dict[str, Tensor]) -> Any:
        counts = count(task, batch)
        poison = task.training and task.global_step == 2
        return counts._replace(loss=counts.loss * (float("nan") if poison else 1.0))

    def note(trainer: Any, task: UpdateTask) -> None:
        weights[trainer.global_step] = task.network.embed.weight.detach().clone()

    with patch.object(CausalLM, "count", poisoned):
        run = fit(shards, "trainer.max_steps=5", also=tuple(After(step, note) for step in (2, 3, 4)))
    assert weights[2].equal(weights[3])
    assert not weights[3].equal(weights[4])
    assert (run.summary["steps"], run.summary["skipped"]) == (5, 1)
    rows = metrics(run.folder, "train/loss", "train/skipped")
    assert [row[1] == row[1] for row in rows] == [True, True, False, True, True]  # no loss, rather than an old one
    assert [row[2] for row in rows[2:]] == [1, 1, 1]


def test_a_loss_in_chunks_gives_gradient_and_metrics_of_the_whole(shards) -> None:
    whole, parts = third_gradients(shards), third_gradients(shards, "trainer.loss_chunk=10")
    assert furthest(whole, parts) < 1e-6
    summaries = [fit(shards, "trainer.max_steps=2", f"trainer.loss_chunk={n}").summary for n in ("null", 10)]
    (loss, correct), (other, also) = [(s["val/loss"], s["val/accuracy"]) for s in summaries]
    assert loss == pytest.approx(other, rel=1e-5)
    assert correct == also
