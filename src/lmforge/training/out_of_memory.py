"""When memory runs out: the exit code, where it happened, what the memory held, and what to type next."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.config.batch import batch_plan
from lmforge.config.connection import connection
from lmforge.config.errors import Exit, ExitError, OutOfMemory, RankLost, exit_code_of, is_out_of_memory
from lmforge.config.remedies import remedies
from lmforge.parallel.connect import no_answer
from lmforge.parallel.watch import GRACE, Death, Watch, oom_kills
from lmforge.runs.facts import size
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.tasks.update import UpdateTask
from lmforge.training.checkpointing import CheckpointCallback
from lmforge.training.resources import peak_memory_bytes

DEATH_SECONDS = 5.0  # how long a rank whose connection broke waits to learn who has died
PASSED_ON = (Exit.WRONG_INPUT, Exit.NON_FINITE, Exit.OUT_OF_MEMORY, Exit.STALL)  # codes that all ranks end with
BROKEN = ("Connection closed", "Connection reset", "Broken pipe", "gloo", "NCCL", "another rank", "Socket")


class MemoryGuard(pl.Callback):
    """Notes what the memory holds when it runs out, before anything is torn down, and watches the other ranks.

    Must come first, so that no other callback waits before it has looked.
    """

    def __init__(self, cfg: DictConfig, run: RunFolder):
        self.cfg: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        self.run = run
        self.began, self.kills = time.time(), oom_kills()
        self.before = 0  # what this process held before there was a network
        self.task: UpdateTask | None = None
        self.trainer: pl.Trainer | None = None
        self.report: str | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.before = peak_memory_bytes(trainer.strategy.root_device)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        self.task, self.trainer = pl_module, trainer
        if (watch := watch_of(trainer)) is not None:
            watch.give_up = self._give_up
            watch.add_neighbours(pl_module.control)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        assert isinstance(pl_module, UpdateTask)
        self.task, self.trainer = pl_module, trainer
        if (watch := watch_of(trainer)) is not None:
            watch.leave_within(GRACE, partial(self._last_words, exception))
        if is_out_of_memory(exception) and not isinstance(exception, ExitError):
            where = self._where(exception)
            forget_frames(exception)
            self.report = f"{where}\n  {str(exception).splitlines()[0] if str(exception) else type(exception).__name__}"
            self.report += f"\n{self._memory()}"

    def _where(self, error: BaseException) -> str:
        """`rank 1 ran out of memory in training: step 5, micro-batch 2 of 4 (8 sequences of 256 tokens)`"""
        assert self.task is not None
        assert self.trainer is not None
        plan = batch_plan(self.cfg)
        rank = f"rank {self.task.global_rank}" if plan.world > 1 else "the process"
        step, shape = self.task.global_step, f"{plan.micro} sequences of {plan.context} tokens"
        if _through_saving(error):
            saved = next(c.saved_step for c in self.trainer.callbacks if isinstance(c, CheckpointCallback))  # type: ignore[attr-defined]
            return f"{rank} ran out of memory while it saved step {saved}"
        if self.trainer.validating:
            return f"{rank} ran out of memory in the validation after step {step} (batches of {shape})"
        if self.task.micro_batch == 0:
            return f"{rank} ran out of memory before its first step"
        part = f"micro-batch {self.task.micro_batch} of {plan.accumulation}"
        part = f"{plan.accumulation} micro-batches in a pipeline" if plan.layout.pp > 1 else part
        return f"{rank} ran out of memory in training: step {step + 1}, {part} ({shape})"

    def _memory(self) -> str:
        """What this rank held by kind, measured where it can be; activations are what the peak leaves over."""
        assert self.task is not None
        assert self.trainer is not None
        device, kinds = self.trainer.strategy.root_device, memory_by_kind(self.task, self.trainer)
        peak = peak_memory_bytes(device)
        kinds["activations and all else"] = max(0, peak - self.before - sum(kinds.values()))
        lines = f"  memory     {', '.join(f'{kind} {size(count)}' for kind, count in kinds.items())}"
        lines += f"\n             most held at once {size(peak)}, {size(self.before)} of it before there was a network"
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            lines += f"\n  CUDA       allocated {size(torch.cuda.memory_allocated(device))}"
            lines += f", reserved {size(torch.cuda.memory_reserved(device))}, free {size(free)} of {size(total)}"
        return lines

    def explain(self, error: BaseException) -> OutOfMemory:
        """Everything there is to say; to be asked once a save in flight has ended, whose checkpoint can be resumed."""
        return OutOfMemory(f"{self.report or error}\n{self._advice()}")

    def _advice(self) -> str:
        found = remedies(self.cfg)
        width = max((len(remedy.words) for remedy in found), default=0)
        same: list[str] = []
        new: list[str] = []
        for remedy in found:
            (same if remedy.resumes else new).append(f"    {remedy.words:<{width}}  {remedy.effect}")
        saved = list_checkpoints(self.run.checkpoints)
        head = f"the run goes on from {saved[-1].name}" if saved else "nothing was saved yet; start again"
        words = f"resume={self.run.path} ..." if saved else "..."
        text = f"  {head} with one of these words, of which the first costs least: python train.py {words}"
        return "\n".join([text, *same, "  only a new run can have:", *new])

    def of_death(self, death: Death) -> ExitError:
        """What this rank ends with after another one's death. A process that SIGKILL ends, or that is gone without a
        word, most likely fell to the kernel when memory ran out."""
        death = death._replace(code=self._noted_code() if death.code is None else death.code)
        what = f"{death} after step {self.task.global_step if self.task is not None else 0}"
        if death.code not in (None, -signal.SIGKILL):
            code = next((code for code in PASSED_ON if code == death.code), Exit.FAILED)
            return RankLost(f"{what}; its own message tells why", code)
        if oom_kills() > self.kills:
            why = "the kernel has just killed a process because memory ran out"
        else:
            why = "most likely the kernel did it because memory ran out (`dmesg` tells), if nobody did it by hand"
        return OutOfMemory(f"{what}: {why}\n{self._advice()}")

    def of_note(self) -> RankLost | None:
        """What this rank ends with after one of another machine, which cannot be watched, has noted why it ended."""
        code = next((code for code in PASSED_ON if code == self._noted_code()), None)
        return RankLost("a rank of another machine has ended; its own message tells why", code) if code else None

    def _noted_code(self) -> int | None:
        """What the rank itself wrote down before it ended, where its exit code could not be asked for."""
        with suppress(OSError):
            if self.run.exit_file.stat().st_mtime >= self.began:
                return self.run.noted_end()
        return None

    def _give_up(self, death: Death) -> int:
        """This rank hangs since another one died."""
        return self._last_words(self.of_death(death))

    def _last_words(self, error: BaseException) -> int:
        """Say why this rank ends, leave the code for wrappers, and return it."""
        error = self.explain(error) if self.report else error
        code = exit_code_of(error)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self.run.note_end(code)
        return int(code)


@contextmanager
def explained(trainer: pl.Trainer) -> Iterator[None]:
    """While the ranks train: raises OutOfMemory in place of whatever memory that ran out looked like, and RankLost or
    OutOfMemory in place of a connection that broke because another rank has died, or does not answer."""
    guard = next(c for c in trainer.callbacks if isinstance(c, MemoryGuard))  # type: ignore[attr-defined]
    try:
        yield
    except ExitError:
        raise
    except Exception as error:
        if guard.report or is_out_of_memory(error):
            raise guard.explain(error) from error
        watch = watch_of(trainer)
        if watch is None or not any(word in str(cause) for cause in causes(error) for word in BROKEN):
            raise
        death = watch.cause(DEATH_SECONDS)
        if death is not None:
            raise guard.of_death(death) from error
        if (other := guard.of_note()) is not None:
            raise other from error
        if (lost := no_answer(causes(error), connection(guard.cfg))) is not None:
            raise lost from error
        raise


def watch_of(trainer: pl.Trainer) -> Watch | None:
    """The watch over the other ranks; None for a process that trains alone."""
    return getattr(trainer.strategy, "watch", None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from or hid."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of what was running, activations above all, which the error holds on to."""
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)


def memory_by_kind(task: UpdateTask, trainer: pl.Trainer) -> dict[str, int]:
    """Bytes this rank holds for each kind of tensor that lives longer than a step."""
    parameters = list(task.network.parameters())
    states = [state for optimizer in trainer.strategy.optimizers for state in optimizer.state.values()]
    return {
        "weights": sum(_bytes(p) for p in parameters),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor)),
    }


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_meta else local.numel() * local.element_size()


def _through_saving(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(os.path.basename(frame.f_code.co_filename) in ("saving.py", "checkpointing.py") for frame, _ in frames)
