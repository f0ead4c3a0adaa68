"""The progress line and the closing summary say what they should, to whom they should."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fits import fit
from lmforge.tasks.update import UpdateTask
from lmforge.training import progress
from lmforge.training.progress import Progress, clock, human


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (999.7, "1k"),
        (1000, "1k"),
        (1234567, "1.23M"),
        (999_499, "999k"),
        (999_950, "1M"),
        (2.5e9, "2.5B"),
        (3e12, "3T"),
    ],
)
def test_human(number, text) -> None:
    assert human(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (93.9, "1:33"), (3599, "59:59"), (3600, "1:00:00")])
def test_clock(seconds, text) -> None:
    assert clock(seconds) == text


@pytest.fixture
def bar(monkeypatch) -> Any:
    """A bar 20 s and 10 steps of 1000 tokens after a resume at step 10 of 40."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    task = UpdateTask.__new__(UpdateTask)
    task.__dict__ |= {"tokens": 10_000, "total_steps": 40, "latest": {"val/loss": 2.5}}
    state = SimpleNamespace(fn="fit")
    trainer = SimpleNamespace(global_step=10, is_global_zero=True, callbacks=[], state=state)
    shown = Progress(refresh_seconds=0.5)
    shown.on_train_start(trainer, task)  # type: ignore[arg-type]
    trainer.global_step, task.__dict__["tokens"], now[0] = 20, 20_000, 120.0
    return SimpleNamespace(shown=shown, trainer=trainer, task=task, now=now)


def test_the_line_counts_from_where_this_process_began(bar) -> None:
    line = bar.shown._line(bar.trainer, bar.task, bar.now[0])
    assert line == "━" * 12 + "╌" * 12 + " step 20/40  20k tokens  500 tokens/s  loss …  0:40 left"
    bar.trainer.callbacks = [SimpleNamespace(train_loss=3.14159)]
    assert "loss 3.142" in bar.shown._line(bar.trainer, bar.task, bar.now[0])


def test_it_is_redrawn_by_time_not_by_step(bar, capsys) -> None:
    for moment in (120.0, 120.2, 120.4, 120.6):
        bar.now[0] = moment
        bar.shown.on_train_batch_end(bar.trainer, bar.task)
    assert capsys.readouterr().err.count("step 20/40") == 2


def test_without_a_terminal_only_validations_are_printed(bar, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    bar.shown.on_train_start(bar.trainer, bar.task)
    bar.shown.on_train_batch_end(bar.trainer, bar.task)
    bar.shown.on_validation_start(bar.trainer, bar.task)
    bar.shown.on_validation_end(bar.trainer, bar.task)
    bar.shown.on_train_end(bar.trainer, bar.task)
    assert capsys.readouterr().err == "step 20: val/loss 2.5000\n"


NAMES = {
    *("val/bits_per_byte", "val/loss", "gzip_bits_per_byte", "xz_bits_per_byte", "tokens_per_second", "mfu"),
    *("data_wait_share", "steps", "tokens", "cpu_seconds"),
}


def test_the_summary_holds_the_stable_names(shards) -> None:
    run = fit(shards)
    stored = json.loads((run.folder / "summary.json").read_text())
    assert stored.keys() >= NAMES
    assert stored == json.loads(json.dumps(run.summary))
    assert (stored["steps"], stored["tokens"], stored["reason"]) == (6, run.task.tokens, "max_steps")
    assert stored["val/loss"] == run.task.latest["val/loss"]
    assert stored["val/bits_per_byte"] is None  # these shards come without a tokenizer
    assert all(stored[name] > 0 for name in ("tokens_per_second", "mfu", "cpu_seconds", "peak_memory_bytes"))
    assert 0 <= stored["data_wait_share"] < 1


def test_the_closing_table_names_folder_and_next_commands(shards, capsys) -> None:
    run = fit(shards)
    text = capsys.readouterr().out
    for part in ("loss, perplexity, accuracy", "tokens per second", "waiting for data", "peak memory", str(run.folder)):
        assert part in text
    assert f"python evaluate.py run={run.folder}" in text


def test_a_folder_with_brackets_and_blanks_is_named_as_it_is(shards, tmp_path, capsys) -> None:
    """Brackets are no markup, and the commands can be typed."""
    run = fit(shards, f"paths.root={tmp_path}/my [v1][", "trainer.max_steps=1")
    text = capsys.readouterr().out
    assert f"run folder  {run.folder}\n" in text
    assert f"python evaluate.py run='{run.folder}'" in text


def test_a_validation_that_is_not_finite_still_ends_with_a_summary(shards, monkeypatch) -> None:
    compute = UpdateTask.on_validation_epoch_end

    def lost(self: UpdateTask) -> None:
        compute(self)
        self.latest["val/loss"] = float("nan")

    monkeypatch.setattr(UpdateTask, "on_validation_epoch_end", lost)
    run = fit(shards)
    assert json.loads((run.folder / "summary.json").read_text())["val/loss"] is None
    assert run.summary["warnings"][-1] == "not finite in the last validation: val/loss"


def test_a_run_of_one_epoch_ends_by_it(shards) -> None:
    run = fit(shards, "trainer.max_steps=100", "trainer.max_epochs=1")
    assert run.summary["reason"] == "max_epochs"
    assert run.summary["epochs"] == 1.0
    assert run.summary["steps"] == -(-len(run.trainer.datamodule.train) // 8)
    rows = run.trainer.datamodule.train.shards
    assert run.summary["tokens"] == rows.n_tokens - rows.n_documents
