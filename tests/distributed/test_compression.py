"""Runs with compressed gradients: what they send, how near they come, and how they go on."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from jobs import digits, last_checkpoint, stop_after, train_on

from lmforge.config.errors import UsageError
from lmforge.data.shards import write_shards
from lmforge.parallel.compress import Compression
from lmforge.training import resume
from lmforge.training.checkpoint import PieceReader
from lmforge.training.rank_state import RankState
from tiny import compose, metrics, new_run

slow = partial(pytest.param, marks=pytest.mark.slow)
WORDS = ("trainer.devices=2", "batch.sequences=12", "trainer.max_steps=8", "callbacks.checkpoint.every_n_steps=4")
POWER = "strategy=ddp_powersgd strategy.rank=2 strategy.start_step=2"


def settings(shards: Path, words: str, *more: str) -> dict[str, Any]:
    return compose(shards, *WORDS, *words.split(), *more)


def trained(shards: Path, words: str, *changes: jobs.Change) -> tuple[Path, dict[str, Any]]:
    """The run's folder, and what rank 0 says of it."""
    plain = settings(shards, words)
    folder = new_run(plain).path
    facts = train_on(2, plain, folder, *changes)
    return folder, facts[0]["summary"]


def not_registered() -> None:
    """A mutation: the strategy says that it compresses, and torch's own all-reduce goes on."""
    Compression.register = lambda self, replica: None  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def uncompressed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    folder, _ = trained(shards, f"strategy=ddp paths.root={tmp_path_factory.mktemp('ddp')}")
    return metrics(folder, "train/loss")


@pytest.mark.parametrize(
    ("words", "share", "tolerance"),
    [
        ("strategy=ddp_bf16", 0.5, 1e-3),
        ("strategy=ddp_fp16 batch.micro_sequences=2", 0.5, 1e-3),
        (POWER, 10624 / 91008, 5e-2),
        ("strategy=ddp", 1.0, 1e-5),
    ],
)
def test_what_is_sent(shards, uncompressed, words, share, tolerance) -> None:
    folder, summary = trained(shards, words)
    sent, plain = summary["comm_bytes_per_step"], summary["comm_bytes_uncompressed"]
    assert sent == pytest.approx(share * plain, rel=1e-9)
    assert (summary["comm_calls"] >= summary["steps"]) == ("ddp_" in words)
    assert metrics(folder, "comm/bytes_per_step")[-1] == (8, sent)
    losses = metrics(folder, "train/loss")
    assert losses == [pytest.approx(row, rel=tolerance) for row in uncompressed]
    assert (losses == uncompressed) == (words == "strategy=ddp")


def test_a_hook_that_does_not_run_is_noticed(shards, uncompressed) -> None:
    folder, summary = trained(shards, "strategy=ddp_bf16", not_registered)
    assert (summary["comm_calls"], summary["comm_bytes_per_step"]) == (0, 0)
    assert metrics(folder, "train/loss") == uncompressed


def test_power_sgd_sends_a_tenth_of_the_default_models_matrices(shards) -> None:
    model = "model.d_model=128 model.n_head=4 model.n_kv_head=2 model.d_ff=336 model.vocab_size=1024"
    words = f"strategy=ddp_powersgd strategy.start_step=1 {model} trainer.max_steps=2 batch.sequences=2"
    assert settings(shards, words)["strategy"]["rank"] == 4
    _, summary = trained(shards, words)
    assert summary["comm_bytes_per_step"] < 0.1 * summary["comm_bytes_uncompressed"]


def forget_errors() -> None:
    """A mutation: a resumed run starts with an empty memory."""
    RankState._remember = lambda *args: None  # type: ignore[method-assign]


@pytest.mark.parametrize(("changes", "same"), [((), True), ((forget_errors,), False)])
def test_power_sgd_goes_on_with_the_same_digits(shards, changes, same) -> None:
    plain = settings(shards, POWER, "model.dropout=0.1")
    whole, parts = new_run(plain).path, new_run(plain).path
    train_on(2, plain, whole)
    train_on(2, plain, parts, stop_after(5))
    train_on(2, plain, parts, *changes)
    assert (digits(parts) == digits(whole)) == same


def note_memory() -> None:
    """Each rank writes down what it goes on with."""
    remember = RankState._remember

    def noted(self: RankState, memory: Any, report: Any) -> None:
        remember(self, memory, report)
        torch.save(memory.own, f"memory-{self.rank}.pt")

    RankState._remember = noted  # type: ignore[method-assign]


def test_on_another_number_of_ranks_all_begin_with_the_mean(shards) -> None:
    plain = settings(shards, POWER)
    folder = new_run(plain).path
    train_on(2, plain, folder, stop_after(4))
    readers = [PieceReader([last_checkpoint(folder).folder / f"local-0000{rank}.safetensors"]) for rank in range(2)]
    expected = {n: (readers[0].read(n) + readers[1].read(n)) / 2 for n in readers[0].names() if "/error/" in n}
    train_on(3, plain, folder, note_memory)
    assert len(expected) > 5
    for rank in range(3):
        memory = torch.load(f"memory-{rank}.pt")
        assert memory.keys() == expected.keys()
        assert all(torch.allclose(memory[name], value) for name, value in expected.items())
        assert any(value.abs().max() > 0 for value in expected.values())


def note_what_is_said() -> None:
    resume.report = lambda line: Path("said").write_text(line)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (POWER, "strategy=ddp", "what powersgd remembered is left out"),
        ("strategy=ddp", POWER, "from powersgd/updates on"),
        slow(POWER, f"{POWER} strategy.rank=3", "from powersgd/factor/embed.weight on"),
    ],
)
def test_another_strategy_goes_on_and_says_so(shards, before, after, said) -> None:
    folder = new_run(settings(shards, before)).path
    train_on(2, settings(shards, before), folder, stop_after(4))
    (first, _) = train_on(2, settings(shards, after), folder, note_what_is_said)
    assert first["step"] == 8
    assert said in Path("said").read_text()


def test_a_memory_of_a_strangers_is_not_trusted(shards) -> None:
    folder, _ = trained(shards, POWER)
    checkpoint = last_checkpoint(folder)
    shutil.copy(checkpoint.folder / "weights-00000.safetensors", checkpoint.folder / "local-00000.safetensors")
    with pytest.raises(UsageError, match="is nothing that this version keeps for a rank"):
        RankState(checkpoint, 0, 2).reader(0)


def write_text_like(folder: Path) -> Path:
    """Documents of a random Markov chain, whose loss falls as slowly as a text's."""
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(60, 0.1), size=60)

    def document() -> np.ndarray:
        tokens = [int(rng.integers(60))]
        for _ in range(rng.integers(20, 200)):
            tokens.append(int(rng.choice(60, p=table[tokens[-1]])))
        return np.array([0, *(2 + token for token in tokens), 1])

    return write_shards(
        folder, {"train": [document() for _ in range(1500)], "val": [document() for _ in range(60)]}, vocab_size=64
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_steps_end_near_those_of_ddp(tmp_path) -> None:
    shards = write_text_like(tmp_path / "text")
    model = "model.d_model=64 model.d_ff=128 model.n_head=4 model.n_kv_head=2 batch.sequences=32 schedule=wsd"
    losses = {}
    for words in ("ddp", "ddp_bf16", "ddp_fp16", "ddp_powersgd strategy.start_step=20"):
        plain = compose(shards, *WORDS, *model.split(), *f"strategy={words} trainer.max_steps=200".split())
        (first, _) = train_on(2, plain, new_run(plain).path, seconds=300)
        losses[words] = first["summary"]["val/loss"]
    assert losses == {words: pytest.approx(losses["ddp"], rel=0.02) for words in losses}
    assert losses["ddp"] < 2.8  # it has learnt
