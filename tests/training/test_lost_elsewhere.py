"""A connection that breaks because a rank of another machine has ended, which can only be read in the run folder."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmforge.config.errors import Exit, RankLost
from lmforge.parallel.watch import Watch
from lmforge.runs.folder import RunFolder
from lmforge.training import out_of_memory
from lmforge.training.out_of_memory import MemoryGuard, explained
from tiny import compose


@pytest.fixture
def trainer(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(out_of_memory, "DEATH_SECONDS", 0.01)
    guard = MemoryGuard(OmegaConf.create(compose(shards, "strategy=ddp", "trainer.devices=2")), RunFolder(tmp_path))
    return SimpleNamespace(callbacks=[guard], strategy=SimpleNamespace(watch=Watch()))


def end_of(trainer: Any) -> None:
    with explained(trainer):
        raise RuntimeError("gloo: Connection closed by peer")


def test_the_code_that_it_noted_is_that_of_the_run(trainer, tmp_path) -> None:
    RunFolder(tmp_path).note_end(Exit.OUT_OF_MEMORY)
    with pytest.raises(RankLost, match="a rank of another machine has ended") as lost:
        end_of(trainer)
    assert lost.value.exit_code == Exit.OUT_OF_MEMORY


@pytest.mark.parametrize("noted", [None, Exit.FAILED])
def test_without_one_the_error_stays(trainer, tmp_path, noted) -> None:
    if noted is not None:
        RunFolder(tmp_path).note_end(noted)
    with pytest.raises(RuntimeError, match="Connection closed"):
        end_of(trainer)


def test_a_note_of_an_earlier_start_counts_for_nothing(trainer, tmp_path) -> None:
    RunFolder(tmp_path).note_end(Exit.OUT_OF_MEMORY)
    os.utime(tmp_path / "exit_code", (1.0, 1.0))
    with pytest.raises(RuntimeError, match="Connection closed"):
        end_of(trainer)
