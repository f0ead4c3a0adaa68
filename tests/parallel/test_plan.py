"""What is applied to a network from outside changes neither its numbers nor its names."""

import math
import warnings

import pytest
import torch

from lmforge.models.gpt import GPT
from lmforge.parallel.plan import Plan
from lmforge.parallel.precision import ForwardPrecision
from tiny import compose, metrics, new_run, train

COLUMNS = ("train/loss", "train/grad_norm", "val/loss")


def losses(shards, *words):
    plain = compose(shards, "trainer.max_steps=3", *words)
    folder = new_run(plain).path
    train(plain, folder)
    return metrics(folder, *COLUMNS)


@pytest.fixture(scope="module")
def plain_losses(shards, tmp_path_factory):
    return losses(shards, f"paths.root={tmp_path_factory.mktemp('plain')}")


@pytest.mark.parametrize(
    "words",
    [
        "trainer.activation_checkpointing=1",
        "trainer.activation_checkpointing=2",
        "compile=eager",
        pytest.param("compile=aot_eager", marks=pytest.mark.slow),
        pytest.param("compile=inductor", marks=pytest.mark.slow),
    ],
)
def test_recomputing_and_compiling_change_no_number(shards, plain_losses, words) -> None:
    for ours, theirs in zip(losses(shards, words), plain_losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)


def test_compiled_and_recomputed_networks_keep_their_names() -> None:
    def build() -> GPT:
        with torch.device("meta"):
            return GPT(64, 16, 2, 2, 1, 32, 64)

    precision = ForwardPrecision("32-true", "float32", "float32", "float32", False, "cpu")
    network = build()
    Plan("single", activation_checkpointing=1, compile_backend="eager").apply(
        network, precision, torch.device("cpu"), 0
    )
    assert list(network.state_dict()) == list(build().state_dict())


def test_every_kth_block_is_recomputed() -> None:
    with torch.device("meta"):
        network = GPT(64, 16, 5, 2, 1, 32, 64)
    precision = ForwardPrecision("32-true", "float32", "float32", "float32", False, "cpu")
    Plan("single", activation_checkpointing=2).apply(network, precision, torch.device("cpu"), 0)
    recomputed = [name for name, block in network.blocks.items() if "forward" in vars(block)]
    assert recomputed == ["1", "3"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("words", ["precision=32-true", "precision=bf16-mixed", "strategy=fsdp precision=bf16-mixed"])
def test_a_gpu_trains_as_the_cpu_does(shards, plain_losses, words) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = losses(shards, "trainer.accelerator=gpu", *words.split())
    for ours, theirs in zip(rows, plain_losses, strict=True):
        assert math.isclose(ours[1], theirs[1], rel_tol=2e-2)
