"""What is advised when memory runs out fits the config: each remedy composes, and none is on already."""

import pytest

from lmforge.config import machine
from lmforge.config.batch import batch_plan
from lmforge.config.errors import Exit, exit_code_of
from lmforge.config.remedies import remedies

CPU = "trainer.accelerator=cpu"


def advised(compose, *words: str) -> list[str]:
    return [remedy.words for remedy in remedies(compose.plain(CPU, *words))]


def test_the_order_is_by_cost_and_what_resumes_comes_first(compose) -> None:
    found = remedies(
        compose.plain(CPU, "strategy=ddp", "trainer.devices=2", "batch.micro_sequences=4", "precision=32-true")
    )
    assert [remedy.words for remedy in found] == [
        "batch.micro_sequences=2",
        "trainer.activation_checkpointing=1",
        "strategy=fsdp",
        "precision=bf16-mixed",
        "model.context=128",
        "model.n_layer=1",
    ]
    assert [remedy.resumes for remedy in found] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["batch.micro_sequences=1"], "batch.micro_sequences"),
        (["trainer.activation_checkpointing=1"], "trainer.activation_checkpointing"),
        (["strategy=fsdp", "trainer.devices=2"], "strategy=fsdp"),
        ([], "strategy=fsdp"),
        (["strategy=deepspeed", "trainer.devices=2", "strategy.stage=3"], "strategy"),
        (["strategy=deepspeed", "trainer.devices=2", "compile=eager"], "strategy"),
        (["strategy=deepspeed", "trainer.devices=2", "precision=bf16-mixed"], "precision"),
        (["precision=bf16-true"], "precision"),
        (["model.n_layer=1"], "model.n_layer"),
        (["data.num_workers=0"], "data.num_workers"),
    ],
)
def test_what_is_on_or_cannot_be_is_not_advised(compose, words, absent) -> None:
    assert not [remedy for remedy in advised(compose, *words) if remedy.startswith(absent)]


def test_what_is_off_is_advised(compose) -> None:
    words = advised(compose, "strategy=fsdp", "trainer.devices=2", "strategy.reshard_after_forward=false",
                    "data.num_workers=2", "trainer.activation_checkpointing=2")  # fmt: skip
    for expected in ("strategy.reshard_after_forward=true", "data.num_workers=0", "trainer.activation_checkpointing=1"):
        assert expected in words


def test_the_last_stage_is_advised(compose) -> None:
    assert "strategy.stage=3" in advised(compose, "strategy=deepspeed", "trainer.devices=2")


def test_more_gpus_where_there_are(compose, monkeypatch) -> None:
    plain = compose.plain("batch.sequences=12", "batch.tokens=null", "batch.micro_sequences=2")
    monkeypatch.setattr(machine, "accelerator", lambda word: "gpu")
    for gpus, devices in ((1, None), (2, 2), (5, 3), (8, 6)):
        monkeypatch.setattr(machine, "gpu_count", lambda gpus=gpus: gpus)
        words = [remedy.words for remedy in remedies(plain)]
        assert (f"strategy=fsdp trainer.devices={devices}" in words) == (devices is not None)


@pytest.mark.parametrize(
    "words", [[], ["strategy=ddp", "trainer.devices=2"], ["batch.tokens=1536"], ["precision=64-true"]]
)
def test_every_remedy_composes_and_keeps_the_global_batch(compose, words) -> None:
    before = batch_plan(compose.plain(CPU, *words))
    for remedy in remedies(compose.plain(CPU, *words)):
        plan = compose.plan(CPU, *words, *remedy.words.split())
        after = batch_plan(plan.plain)
        assert after.sequences * after.context == before.sequences * before.context
        assert after.micro < before.micro or "micro" not in remedy.words


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (ValueError("out of memory is what this text speaks of"), False),
        (RuntimeError("Connection closed by peer"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, out) -> None:
    assert (exit_code_of(error) is Exit.OUT_OF_MEMORY) is out
    wrapped = RuntimeError("while doing something")
    wrapped.__cause__ = error
    assert (exit_code_of(wrapped) is Exit.OUT_OF_MEMORY) is out
