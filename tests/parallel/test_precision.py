"""What each precision word means: dtypes of weights, compute, gradients, and the scaler."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from builders import random_ids, tiny_gpt
from fits import fit, score
from lmforge.models.attention import attend
from lmforge.parallel.precision import ForwardPrecision
from lmforge.runs.folder import list_checkpoints
from lmforge.training.checkpoint import Checkpoint
from tiny import metrics

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "precision"
DTYPES = {
    "32-true": (torch.float32, torch.float32),
    "64-true": (torch.float64, torch.float64),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}


def precision(word: str) -> ForwardPrecision:
    return ForwardPrecision(**yaml.safe_load((CONFIGS / f"{word}.yaml").read_text()), device="cpu")


@pytest.mark.parametrize(("word", "dtypes"), DTYPES.items())
def test_a_word_means_its_dtypes_in_words_and_in_deed(word, dtypes) -> None:
    weights, compute = dtypes
    plugin, network, seen = precision(word), tiny_gpt(), []
    assert (plugin.weights, plugin.compute) == dtypes
    assert plugin.describe().startswith(f"weights {str(weights)[6:]}, compute {str(compute)[6:]}, gradient reduction")
    assert plugin.scaler.is_enabled() == (word == "16-mixed")
    plugin.apply(network, sharded=False)
    for block in network.blocks.values():
        block.attention.attend = lambda *a, **b: seen.append({x.dtype for x in a[:3]}) or attend(*a, **b)
    logits = network(random_ids(1, 8))
    logits.float().square().mean().backward()
    assert logits.dtype == compute
    assert seen == [{compute}] * 2
    assert {p.dtype for p in network.parameters()} == {p.grad.dtype for p in network.parameters()} == {weights}


def test_sharded_weights_are_cast_by_fsdp_alone() -> None:
    plugin, network = precision("bf16-mixed"), tiny_gpt()
    plugin.apply(network, sharded=True)
    assert network(random_ids(1, 8)).dtype == torch.float32
    policy = plugin.sharded_policy()
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1


def test_a_step_that_is_not_finite_touches_no_optimizer() -> None:
    optimizers = [Counting(nn.Linear(1, 1).parameters()) for _ in range(2)]
    plugin = precision("32-true")
    plugin.step(optimizers, finite=False)
    plugin.step(optimizers, finite=True)
    assert [optimizer.steps for optimizer in optimizers] == [1, 1]


def test_the_scaler_halves_its_scale_and_its_state_goes_into_a_checkpoint() -> None:
    plugin, weight = precision("16-mixed"), nn.Parameter(torch.ones(1))
    optimizer = Counting([weight])
    weight.grad = torch.full((1,), torch.inf)
    plugin.scaler.scale(torch.zeros(1))
    plugin.unscale([optimizer])
    plugin.step([optimizer], finite=False)
    other = precision("16-mixed")
    other.load_state_dict(plugin.state_dict())
    assert other.scaler.get_scale() == plugin.scaler.get_scale() == 32768.0
    assert precision("32-true").state_dict() == {}


@pytest.mark.parametrize(
    "word", ["bf16-mixed", "bf16-true", pytest.param("16-mixed", marks=pytest.mark.slow), "64-true"]
)
def test_a_run_learns_and_stores_its_weights_in_their_dtype(shards, word) -> None:
    run = fit(shards, f"precision={word}", "optimizer.lr=1e-2", "trainer.max_steps=8", "batch.sequences=2")
    reader = Checkpoint(list_checkpoints(run.folder / "checkpoints")[-1]).reader("weights")
    assert {reader.dtype(name) for name in reader.names()} == {DTYPES[word][0]}
    losses = [row[1] for row in metrics(run.folder, "train/loss") if row[1] == row[1]]
    assert losses[-1] < losses[0] - 0.1
    assert run.summary["skipped"] <= (word == "16-mixed")


def test_evaluation_is_in_float32_whatever_the_training_was(shards) -> None:
    run = fit(shards, "precision=bf16-mixed")
    default, explicit = score(run.folder), score(run.folder, "precision=32-true")
    assert default["precision"].startswith("weights float32, compute float32")
    assert default["loss"] == explicit["loss"] != score(run.folder, "precision=bf16-mixed")["loss"]
