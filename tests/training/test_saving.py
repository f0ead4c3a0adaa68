"""Which checkpoints stay, and writing that neither blocks nor leaves anything half done."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_gpt
from fits import After, fit, killed, score
from lmforge.config.errors import SaveFailed
from lmforge.parallel.control import Control
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.training import saving
from lmforge.training.checkpoint import Checkpoint, Piece
from lmforge.training.checkpointing import CheckpointCallback
from lmforge.training.resume import find_checkpoint, keep_rule
from lmforge.training.saving import Keep, Saver, weight_pieces, whole_checkpoints

PIECES = {"weights": weight_pieces(tiny_gpt()), "optimizer": {}, "local": {}}


def saver(folder: Path, last: int = 1, best: int = 1, mode: str = "min") -> Saver:
    return Saver(folder, rank=0, world=1, keep=Keep(last, best, "val/loss", mode))


def state(step: int, value: float | None = None) -> dict[str, Any]:
    metrics = {} if value is None or not math.isfinite(value) else {"val/loss": value}
    return {"step": step, "metrics": metrics, "callbacks": {}}


def save_all(writer: Saver, values: list[float | None], first: int = 1) -> list[int]:
    """Save one step a value; the steps that are left."""
    for step, value in enumerate(values, first):
        writer.save(state(step, value), PIECES)
    writer.wait()
    return steps(writer.folder)


def steps(folder: Path) -> list[int]:
    return [Checkpoint(path).step for path in list_checkpoints(folder)]


def best(folder: Path, mode: str = "min") -> int:
    return find_checkpoint(folder, "best", Keep(1, 1, "val/loss", mode), print).step


def test_two_best_and_one_last_over_the_whole_history_of_four_processes(tmp_path) -> None:
    values = [[5.0, 3.0, 4.0], [2.0, 6.0], [7.0], [6.5, 6.4]]
    done = 0
    for part in values:
        before = max(steps(tmp_path), default=0)
        assert before == done  # where each process goes on
        left = save_all(saver(tmp_path, best=2), part, first=done + 1)
        done += len(part)
        assert max(left) == done
    assert steps(tmp_path) == [2, 4, 8]
    assert best(tmp_path) == 4


def test_a_process_that_forgets_the_history_is_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Keep, "best_of", lambda self, checkpoints: [])
    save_all(saver(tmp_path, best=2), [5.0, 3.0, 4.0])
    assert steps(tmp_path) == [3]


def test_the_metric_is_in_no_name_and_leaves_no_folder(tmp_path) -> None:
    save_all(saver(tmp_path), [5.0, 3.0, 4.0, 3.5, 6.0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005"]
    assert all(path.is_file() for folder in tmp_path.iterdir() for path in folder.iterdir())


@pytest.mark.parametrize(
    ("values", "expected"),
    [([math.nan, 0.9, 0.5, math.nan, 0.7], 0.5), ([0.5, -math.inf, 0.4], 0.4), ([math.nan, math.nan], None)],
)
def test_what_is_not_finite_is_never_best_and_never_in_the_way(tmp_path, values, expected) -> None:
    save_all(saver(tmp_path), values)
    kept = Checkpoint(tmp_path / f"step-{best(tmp_path):08d}")
    assert kept.state["metrics"].get("val/loss") == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.1", [1.0], {}])
def test_what_is_no_finite_number_has_no_rank(value) -> None:
    assert Keep(1, 1, "val/loss", "min").value({"metrics": {"val/loss": value}}) is None


def test_a_metric_to_maximise(tmp_path) -> None:
    assert save_all(saver(tmp_path, mode="max"), [0.1, 0.9, 0.5]) == [2, 3]
    assert best(tmp_path, "max") == 2


def test_of_equals_the_earlier_is_best(tmp_path) -> None:
    assert save_all(saver(tmp_path), [0.5, 0.5, 0.5]) == [1, 3]


def test_keep_last_counts_the_newest(tmp_path) -> None:
    assert save_all(saver(tmp_path, last=3, best=0), [None] * 6) == [4, 5, 6]


@pytest.fixture
def slow(monkeypatch) -> Iterator[threading.Event]:
    """Writing that waits until the event is set."""
    gate = threading.Event()
    write = saving.write_pieces
    monkeypatch.setattr(saving, "write_pieces", lambda *args: gate.wait(60) and write(*args))
    yield gate
    gate.set()


def test_a_save_returns_before_it_is_written_and_takes_the_values_of_that_moment(tmp_path, slow) -> None:
    network = tiny_gpt()
    started = network.embed.weight.detach().clone()
    writer = saver(tmp_path)
    began = time.perf_counter()
    writer.save(state(1), {**PIECES, "weights": weight_pieces(network)})
    assert time.perf_counter() - began < 10
    writer.let_change()
    assert writer.blocked_seconds < 10
    with torch.no_grad():
        network.embed.weight.zero_()
    assert list_checkpoints(tmp_path) == []
    slow.set()
    writer.wait()
    assert Checkpoint(tmp_path / "step-00000001").reader("weights").read("embed.weight").equal(started)


@pytest.mark.parametrize("waits", [True, False])
def test_an_update_waits_for_the_copy_of_the_state_before_it(shards, monkeypatch, waits) -> None:
    """A copy that takes longer than a step; mutation: an update that does not wait gets into the checkpoint."""
    copy = Saver._copies

    def slowly(self: Saver, kind: str, pieces: dict[str, Piece]) -> dict[str, Piece]:
        time.sleep(0.3 if kind == "weights" else 0.0)
        return copy(self, kind, pieces)

    monkeypatch.setattr(Saver, "_copies", slowly)
    if not waits:
        monkeypatch.setattr(Saver, "let_change", lambda self: None)
    noted: dict[str, torch.Tensor] = {}
    note = After(2, lambda trainer, task: noted.update(w=task.network.embed.weight.detach().clone()))
    words = ("callbacks.checkpoint.every_n_steps=2", "callbacks.checkpoint.keep_last=9", "trainer.max_steps=3")
    run = fit(shards, *words, also=(note,))
    saved = Checkpoint(run.folder / "checkpoints" / "step-00000002").reader("weights").read("embed.weight")
    assert saved.equal(noted["w"]) == waits


def test_a_second_save_waits_for_the_first(tmp_path, slow) -> None:
    writer = saver(tmp_path, last=2)
    writer.save(state(1), PIECES)
    threading.Timer(0.2, slow.set).start()
    writer.save(state(2), PIECES)
    assert writer.blocked_seconds > 0.1
    assert steps(tmp_path)[:1] == [1]
    writer.wait()
    assert steps(tmp_path) == [1, 2]


def full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["write_pieces", "write_json", "sync"])
def test_a_failed_save_is_raised_and_leaves_the_former_one_alone(tmp_path, monkeypatch, where) -> None:
    writer = saver(tmp_path)
    save_all(writer, [1.0])
    monkeypatch.setattr(saving, where, full_disk)
    writer.save(state(2, 0.5), PIECES)
    with pytest.raises(SaveFailed, match="No space left"):
        writer.wait()
    assert writer.failed()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert whole_checkpoints(tmp_path)[0].step == 1


def test_a_failed_save_ends_the_run_at_the_next_step(shards, monkeypatch) -> None:
    monkeypatch.setattr(saving, "write_pieces", full_disk)
    seen: list[int] = []
    join = After(2, lambda trainer, task: callback(trainer).saver.thread.join())
    note = [After(step, lambda trainer, task: seen.append(trainer.global_step)) for step in range(1, 7)]
    with pytest.raises(SaveFailed, match="No space left"):
        fit(shards, "callbacks.checkpoint.every_n_steps=2", also=(join, *note))
    assert seen == [1, 2]
    assert list(Path("runs").glob("*/*/checkpoints/*")) == []


def callback(trainer: Any) -> CheckpointCallback:
    return next(c for c in trainer.callbacks if isinstance(c, CheckpointCallback))


def test_leftovers_of_an_interrupted_save_are_removed_and_never_read(tmp_path) -> None:
    save_all(saver(tmp_path), [1.0])
    part = tmp_path / ".step-00000009.part"
    part.mkdir()
    (part / "weights-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".step-00000001.old").mkdir()
    assert steps(tmp_path) == [1]
    said: list[str] = []
    saver(tmp_path).clean(said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert said == [f"{part}: a save that did not come to its end; removed"]


def test_a_broken_checkpoint_of_the_same_step_is_replaced(tmp_path) -> None:
    save_all(saver(tmp_path), [1.0])
    (tmp_path / "step-00000001" / "weights-00000.safetensors").write_bytes(b"")
    assert save_all(saver(tmp_path), [1.0]) == [1]
    Checkpoint(tmp_path / "step-00000001").verify()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_buffers_are_reused_and_follow_a_new_shape(tmp_path) -> None:
    writer = saver(tmp_path)
    save_all(writer, [None, None])
    buffers = dict(writer.buffers)
    save_all(writer, [None], first=3)
    assert all(writer.buffers[key] is buffer for key, buffer in buffers.items())
    writer.save(state(4), {**PIECES, "weights": weight_pieces(tiny_gpt(d_model=16))})
    writer.wait()
    assert Checkpoint(tmp_path / "step-00000004").reader("weights").shapes["embed.weight"] == (64, 16)


def test_settling_alone_raises_what_went_wrong(tmp_path, monkeypatch) -> None:
    writer = saver(tmp_path)
    writer.save(state(1), PIECES)
    writer.settle(Control())
    monkeypatch.setattr(saving, "write_pieces", full_disk)
    writer.save(state(2), PIECES)
    with pytest.raises(SaveFailed, match="No space left"):
        writer.settle(Control())


SAVING = ("trainer.val_every_n_steps=2", "callbacks.checkpoint.every_n_steps=2", "optimizer.lr=3e-3")


def test_a_run_keeps_its_best_and_its_last(shards) -> None:
    run = fit(shards, *SAVING, "callbacks.checkpoint.monitor=val/accuracy", "callbacks.checkpoint.mode=max")
    folder = run.folder / "checkpoints"
    scores = {c.step: c.state["metrics"]["val/accuracy"] for c in whole_checkpoints(folder)}
    assert max(scores) == 6
    assert len(scores) <= 2
    found = find_checkpoint(folder, "best", keep_rule(RunFolder(run.folder)), print)
    assert found.state["metrics"]["val/accuracy"] == max(scores.values())


def test_three_kills_and_resumes_pile_nothing_up(shards) -> None:
    words = (*SAVING, "callbacks.checkpoint.keep_best=2", "trainer.max_steps=8")
    folder = killed(shards, *words, step=3)
    starts = []
    for step in (5, 7):
        starts.append(max(steps(folder / "checkpoints")))
        with pytest.raises(RuntimeError, match="again"):
            fit(shards, *words, folder=folder, also=(After(step, again),))
    starts.append(max(steps(folder / "checkpoints")))
    fit(shards, *words, folder=folder)
    assert starts == [2, 4, 6]
    left = steps(folder / "checkpoints")
    assert left[-1] == 8
    assert len(left) <= 3
    assert len(list((folder / "checkpoints").iterdir())) == len(left)


def again(trainer: Any, task: Any) -> None:
    raise RuntimeError("killed again")


def test_saves_fall_due_without_a_validation_split(tmp_path) -> None:
    """Where no validation will follow, a step that would be followed by one must save by itself."""
    from lmforge.data.shards import write_shards

    folder = write_shards(tmp_path / "s", {"train": [torch.arange(50).numpy()] * 20}, vocab_size=60)
    run = fit(folder, *SAVING, "callbacks.checkpoint.keep_last=10")
    assert steps(run.folder / "checkpoints") == [2, 4, 6]
    assert run.summary["val/loss"] is None


def test_evaluate_reads_best_last_and_a_path(shards) -> None:
    run = fit(shards, *SAVING, "callbacks.checkpoint.keep_last=10")
    folder = run.folder / "checkpoints"
    assert score(run.folder, "ckpt=last")["step"] == 6
    assert score(run.folder, f"ckpt={folder / 'step-00000002'}")["step"] == 2
    assert (
        score(run.folder, "ckpt=best")["step"]
        == find_checkpoint(folder, "best", keep_rule(RunFolder(run.folder)), print).step
    )
