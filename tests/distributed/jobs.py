"""What a rank does in these tests: a whole training that is watched, and that `changes` may spoil first."""

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import tiny
from lmforge.config.errors import ExitError
from lmforge.data import module
from lmforge.data.packing import PackedRows
from lmforge.data.windows import Window, Windows
from lmforge.parallel.control import Agreed, Control
from lmforge.parallel.parallel import Parallel
from lmforge.parallel.plan import Plan
from lmforge.runs.folder import list_checkpoints
from lmforge.runs.rows import read_rows
from lmforge.tasks.causal_lm import CausalLM
from lmforge.tasks.metrics import Counts
from lmforge.tasks.update import UpdateTask
from lmforge.training import resume, saving
from lmforge.training.checkpoint import Checkpoint
from lmforge.training.logbook import Logbook
from ranks import run_ranks

Facts = dict[str, Any]
Change = Callable[[], None]


def train_on(world: int, plain: dict[str, Any], folder: Path, *changes: Change, seconds: float = 150.0) -> list[Facts]:
    """Train a run (or go on with it) on `world` real ranks; what each saw, in order of rank."""
    plain = {**plain, "trainer": {**plain["trainer"], "devices": world}}
    return run_ranks(watched, world, plain, str(folder), *changes, seconds=seconds)


def watched(plain: dict[str, Any], folder: str, *changes: Change) -> Facts:
    """Train after `changes` to this process; the facts hold what this rank fetched, drew and ended with."""
    facts: Facts = {"numbers": {}, "rows": {}, "targets": {}, "draws": {}, "row_draws": [], "stopped": None}
    watch(facts)
    for change in changes:
        change()
    try:
        facts["summary"] = tiny.train(plain, folder)
    except ExitError as error:
        facts["stopped"] = type(error).__name__
    return facts


def unwatched(plain: dict[str, Any], folder: str, *changes: Change) -> None:
    """Train after `changes`; whatever ends the training is raised."""
    for change in changes:
        change()
    tiny.train(plain, folder)


def watch(facts: Facts) -> None:
    fetch, seed, count, leave = Windows.__getitem__, UpdateTask._seed, CausalLM.count, resume.leave_if_stopped

    def noted_fetch(windows: Windows, update: int) -> Window:
        window = fetch(windows, update)
        if getattr(windows.order, "shuffle", True):  # not where rows are scored
            numbers = windows.numbers(update).ravel()
            facts["numbers"][update] = numbers.tolist()
            facts["rows"][update] = windows.order(numbers).tolist()
            facts["targets"][update] = window["targets"]
        return window

    def noted_seed(task: UpdateTask, step: int) -> None:
        seed(task, step)
        with torch.random.fork_rng(devices=[]):
            facts["draws"][step] = (random.random(), np.random.random(), torch.rand(()).item())

    def noted_count(task: CausalLM, batch: Any) -> Counts:
        if "draws" in batch and task.training:
            facts["row_draws"].append(tuple(batch["draws"].tolist()))
        return count(task, batch)

    def noted_end(trainer: Any, run: Any) -> None:
        facts.update(end_of(trainer))
        leave(trainer, run)

    Windows.__getitem__, UpdateTask._seed = noted_fetch, noted_seed  # type: ignore[method-assign]
    CausalLM.count, resume.leave_if_stopped = noted_count, noted_end  # type: ignore[method-assign]


def end_of(trainer: Any) -> Facts:
    """A rank's state after training: its logged loss, skipped updates, and how much of each tensor it holds."""
    task = trainer.lightning_module
    states = [state for optimizer in trainer.strategy.optimizers for state in optimizer.state.values()]
    return {
        "step": trainer.global_step,
        "data": str(trainer.datamodule.folder),
        "logged_loss": next(c.train_loss for c in trainer.callbacks if isinstance(c, Logbook)),
        "skipped": task.skipped,
        "parameters": {name: (local(p).numel(), p.numel()) for name, p in task.network.named_parameters()},
        "moments": sum(local(value).numel() for state in states for value in state.values() if value.dim()),
        "finite": all(bool(torch.isfinite(local(p)).all()) for p in task.network.parameters()),
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Changes. Each is a plain function, so that it reaches the ranks by name.


def wrong_scale() -> None:
    """The factor that undoes the averaging over ranks is forgotten."""
    apply = Plan.apply

    def one(*args: Any) -> Parallel:
        parallel = apply(*args)
        parallel.size = 1
        return parallel

    Plan.apply = one  # type: ignore[method-assign]


def unsynchronised() -> None:
    """Gradients of the other ranks never arrive (ddp)."""

    def never(self: Plan, *args: Any) -> Parallel:
        parallel = apply(self, *args)
        sync = parallel.sync
        parallel.sync = lambda last: sync(False)  # type: ignore[method-assign]
        return parallel

    apply, Plan.apply = Plan.apply, never  # type: ignore[method-assign]


def dropped_rank() -> None:
    """Rank 1's micro-batches are counted, but add nothing to the gradient."""
    _change_counts(lambda task, counts: counts._replace(loss=counts.loss * float(task.global_rank != 1)))


def _change_counts(change: Callable[[CausalLM, Counts], Counts]) -> None:
    measure = CausalLM.measure

    def changed(task: CausalLM, *args: Any, **named: Any) -> Counts:
        return change(task, measure(task, *args, **named))

    CausalLM.measure = changed  # type: ignore[method-assign]


def mean_of_means() -> None:
    """Every rank divides by its own count of targets."""
    agree = Control.agree

    def own(self: Control, mine: Agreed) -> Agreed:
        return agree(self, mine)._replace(targets=mine.targets * self.world)

    Control.agree = own  # type: ignore[method-assign]


def forget_position() -> None:
    """A resumed run reads its data from the start again."""
    numbers = Windows.numbers
    Windows.numbers = lambda self, update: numbers(self, update - 3)  # type: ignore[method-assign]


def forget_moments() -> None:
    """A resumed run starts with an empty optimizer."""
    resume.load_optimizers = lambda *args: None  # type: ignore[assignment]


def forget_step_in_draws() -> None:
    """A resumed run draws the dropout of its first steps again."""
    seed = UpdateTask._seed
    UpdateTask._seed = lambda task, step: seed(task, step - 3)  # type: ignore[method-assign]


def nan_at(rank: int, step: int) -> None:
    """The loss of one rank is not a number in one update."""

    def spoil(task: CausalLM, counts: Counts) -> Counts:
        here = task.training and task.global_rank == rank and task.global_step + 1 == step
        return counts._replace(loss=counts.loss * torch.nan) if here else counts

    _change_counts(spoil)


def signal_at(rank: int, step: int, number: int = signal.SIGTERM) -> None:
    """One rank gets a signal while it computes one update; the ranks agree on it at the next."""
    seed = UpdateTask._seed

    def told(task: UpdateTask, now: int) -> None:
        seed(task, now)
        if task.global_rank == rank and now == step:
            os.kill(os.getpid(), number)

    UpdateTask._seed = told  # type: ignore[method-assign]


def unwritable(rank: int, error: BaseException | None = None, step: str = "") -> None:
    """One rank's disk is full, or it fails otherwise when it writes the checkpoint of a step."""
    write = saving.write_pieces

    def full(folder: Path, kind: str, writer: int, pieces: Any) -> Any:
        if writer == rank and step in folder.name:
            raise error or OSError(28, "No space left on device")
        return write(folder, kind, writer, pieces)

    saving.write_pieces = full


class RandomRows(PackedRows):
    """Rows that draw from all three global streams, in a loader's worker where there are workers."""

    draws = True

    def batch(self, rows: Any) -> dict[str, torch.Tensor]:
        drawn = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])
        return super().batch(rows) | {"draws": drawn}


def random_rows() -> None:
    module.PackedRows = RandomRows  # type: ignore[misc]


def error_at(rank: int, step: int) -> None:
    """One rank fails with an ordinary error."""
    _at(rank, step, partial(_fail, RuntimeError("told to fail")))


def kill_at(rank: int, step: int) -> None:
    """One rank is killed as the kernel does it when memory runs out."""
    _at(rank, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def leave_at(rank: int, step: int, code: int) -> None:
    """One rank ends with a code of its own, and notes it as the front door does."""
    _at(rank, step, partial(_leave, code))


def _leave(code: int) -> None:
    (run,) = Path("runs/default").iterdir()
    (run / "exit_code").write_text(f"{code}\n")
    os._exit(code)


def no_memory_at(rank: int, step: int, where: str) -> None:
    """One rank's allocator fails, in a step or while it writes the checkpoint after it."""
    if where == "saving":
        unwritable(rank, MemoryError(), f"step-{step:08d}")
    else:
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")
        _at(rank, step, partial(_fail, error))


def _fail(error: BaseException) -> None:
    raise error


def _at(rank: int, step: int, act: Callable[[], None]) -> None:
    seed = UpdateTask._seed

    def seeded(task: UpdateTask, now: int) -> None:
        seed(task, now)
        task.micro_batch = 1
        if task.global_rank == rank and now == step:
            act()

    UpdateTask._seed = seeded  # type: ignore[method-assign]


def stop_after(step: int, rank: int = 0) -> Change:
    """End by SIGTERM with `step` updates done."""
    return partial(signal_at, rank, step - 1)


# Reading what is left on disk.


def last_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(list_checkpoints(folder / "checkpoints")[-1])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = last_checkpoint(folder).reader("weights")
    return {name: reader.read(name) for name in reader.names()}


def digits(folder: Path) -> tuple[str, dict[str, str]]:
    """All that must be the same to the last digit: the log without its speeds, and the sha256 of every file saved."""
    rows = read_rows(folder / "metrics.csv")
    log = [{name: value for name, value in row.items() if not name.startswith("speed/")} for row in rows]
    return str(log), {name: entry["sha256"] for name, entry in last_checkpoint(folder).files.items()}
