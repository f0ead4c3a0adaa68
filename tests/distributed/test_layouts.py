"""Every layout of the mesh trains exactly as one process does, and a mistake in any part of it is noticed."""

from functools import partial
from pathlib import Path

import jobs
import pytest
import spoiled
import torch
from parity import Alone, differences, spread

SHAPE = ("model.n_layer=4", "model.n_kv_head=2", "precision=64-true")
LONG = "trainer.max_steps=20"
GPT2 = (
    "model.norm=layer model.bias=true model.positions=learned model.qk_norm=false model.activation=gelu model.tied=true"
)
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(shards, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("strategy=hsdp strategy.shard=2 trainer.devices=4", (LONG,)),
        slow("strategy=fsdp strategy.shard=1 trainer.devices=2", ()),
        ("strategy=shard_grad_op trainer.devices=2 batch.micro_sequences=2", (LONG,)),
        ("strategy=tensor trainer.devices=2", (LONG,)),
        ("strategy=tensor trainer.devices=4 trainer.activation_checkpointing=1 batch.micro_sequences=3", (LONG,)),
        ("strategy=tensor trainer.devices=2 trainer.loss_chunk=7", GPT2.split()),
        slow("strategy=tensor trainer.devices=2", ("model.norm_place=post",)),
        slow("strategy=tensor trainer.devices=2 compile=eager", ()),
        ("strategy=tensor trainer.devices=4", ("optimizer=muon",)),
        ("strategy=context trainer.devices=2", (LONG,)),
        ("strategy=context strategy.tp=2 trainer.devices=4 trainer.loss_chunk=5", ()),
        slow("strategy=context strategy.cp=4 trainer.devices=4 trainer.activation_checkpointing=1", GPT2.split()),
        ("strategy=pipeline trainer.devices=2 trainer.activation_checkpointing=2", (LONG,)),
        ("strategy=pipeline trainer.devices=2 trainer.loss_chunk=9", GPT2.split()),
        ("strategy=pipeline strategy.virtual_stages=2 trainer.devices=2 batch.micro_sequences=2", (LONG,)),
        ("strategy=pipeline strategy.pp=4 trainer.devices=4", ("optimizer=muon",)),
        slow("strategy=pipeline strategy.cp=2 trainer.devices=4", ()),
        ("strategy=3d trainer.devices=8", (LONG,)),
    ],
)
def test_a_layout_equals_one_process(shards, alone, words, numbers) -> None:
    words, numbers = f"{words} batch.sequences=12", (*SHAPE, *numbers)
    assert differences(spread(shards, words, numbers), alone(*numbers), 1e-9) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs, which NCCL wants one of for each rank")
@pytest.mark.parametrize("strategy", ["hsdp strategy.shard=1", "tensor", "context", "pipeline"])
def test_two_gpus_equal_one_process(shards, alone, strategy) -> None:
    words = f"strategy={strategy} trainer.devices=2 trainer.accelerator=gpu batch.sequences=12"
    assert differences(spread(shards, words, SHAPE), alone(*SHAPE), 1e-7) == []


@pytest.mark.parametrize("strategy", ["tensor", "context", "pipeline"])
def test_low_precision_stays_close(shards, alone, strategy) -> None:
    numbers = (*SHAPE[:2], "precision=bf16-mixed")
    rows, expected = spread(shards, f"strategy={strategy} trainer.devices=2", numbers), alone(*numbers)
    assert differences([row[:-1] for row in rows], [row[:-1] for row in expected], 5e-2) == []


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("strategy=tensor", spoiled.norms_see_their_positions_alone),
        ("strategy=tensor", spoiled.heads_norms_see_their_heads_alone),
        ("strategy=tensor", spoiled.copies_count_twice),
        ("strategy=context", spoiled.keys_keep_their_own_gradient),
        ("strategy=context", spoiled.positions_start_again),
        ("strategy=context", spoiled.everyone_speaks),
        ("strategy=pipeline", spoiled.ends_keep_their_own_gradient),
        ("strategy=pipeline", spoiled.both_ends_count),
        ("strategy=hsdp strategy.shard=1", jobs.wrong_scale),
    ],
)
def test_a_spoiled_layout_is_noticed(shards, alone, words, spoil) -> None:
    words, numbers = f"{words} trainer.devices=2 trainer.max_steps=3", (*SHAPE, "model.tied=true")
    rows, expected = spread(shards, words, numbers, spoil), alone(*numbers)[:3]
    wrong = differences([row[:3] for row in rows], [row[:3] for row in expected], 1e-9)
    assert wrong, "the training came out right all the same"
