"""Where memory ran out and what it held, for each phase of a run."""

import re
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fits import fit
from lmforge.config.errors import OutOfMemory
from lmforge.parallel.plan import Plan
from lmforge.runs.folder import list_checkpoints
from lmforge.tasks.causal_lm import CausalLM
from lmforge.training import saving

WORDS = ("trainer.val_every_n_steps=3", "batch.micro_sequences=4", "callbacks.checkpoint.every_n_steps=2")


def ends(shards, *words: str) -> str:
    with pytest.raises(OutOfMemory) as error:
        fit(shards, *WORDS, *words)
    return str(error.value)


def full(*args: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand many lines more")


def test_in_training_with_the_micro_batch(shards, monkeypatch) -> None:
    count = CausalLM.count

    def second(task: CausalLM, batch):
        return full() if task.training and (task.global_step, task.micro_batch) == (4, 2) else count(task, batch)

    monkeypatch.setattr(CausalLM, "count", second)
    said = ends(shards)
    assert said.startswith(
        "the process ran out of memory in training: step 5, micro-batch 2 of 2 (4 sequences of 32 tokens)\n"
        "  CUDA out of memory. Tried to allocate 2.00 GiB.\n  memory     weights 91.0 kB, gradients 91.0 kB, "
    )
    assert "many lines more" not in said
    assert "the run goes on from step-00000004" in said


def test_in_a_validation(shards, monkeypatch) -> None:
    count = CausalLM.count
    monkeypatch.setattr(CausalLM, "count", lambda task, batch: count(task, batch) if task.training else full())
    said = ends(shards)
    assert said.startswith("the process ran out of memory in the validation after step 3 (batches of 4 sequences")


def test_while_saving(shards, monkeypatch) -> None:
    monkeypatch.setattr(saving, "write_pieces", full)
    said = ends(shards)
    assert said.startswith("the process ran out of memory while it saved step 2\n")
    assert "nothing was saved yet; start again" in said


def test_before_the_first_step(shards) -> None:
    with patch.object(Plan, "apply", full):
        said = ends(shards)
    assert said.startswith("the process ran out of memory before its first step")
    assert "weights 0 B" in said


def test_a_checkpoint_in_flight_is_finished(shards, monkeypatch) -> None:
    """The step after a save fails while the save is still being written."""
    write, count = saving.write_pieces, CausalLM.count
    monkeypatch.setattr(saving, "write_pieces", lambda *args: (time.sleep(0.2), write(*args))[1])
    monkeypatch.setattr(CausalLM, "count", lambda t, b: full() if t.global_step == 2 and t.training else count(t, b))
    said = ends(shards)
    (run,) = re.findall(r"resume=(\S+) ", said)
    assert "the run goes on from step-00000002" in said
    assert [path.name for path in list_checkpoints(Path(run) / "checkpoints")] == ["step-00000002"]
