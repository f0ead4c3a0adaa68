"""Where a rank is in its step, read off its Python stack once it hangs; until then nobody has to note anything."""

import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

# What a rank is doing -> beginnings of `module:function` that show it anywhere on the stack; the first phase that fits.
PHASES: dict[str, tuple[str, ...]] = {
    "debugger": ("pdb:", "bdb:", "pydevd", "debugpy"),
    "saving": ("lmforge.training.saving:", "lmforge.training.checkpointing:"),
    "sample": ("lmforge.training.samples:",),
    "validation": ("lightning.pytorch.loops.evaluation_loop:",),
    "data": ("lmforge.data.", "lightning.pytorch.loops.fetchers:"),
    "agreement": ("lmforge.parallel.control:agree",),
    "update": ("lmforge.tasks.update:_finish",),
    "norm": ("lmforge.parallel.parallel:norm", "lmforge.parallel.parallel:clip", "lmforge.parallel.norm:"),
    "backward": ("torch.autograd.graph:_engine_run_backward",),
    "forward": ("lmforge.tasks.update:training_step",),
    "callback": ("lightning.pytorch.trainer.call:_call_callback_hooks",),
}
# The phases of one step in their order; `{}` is its number. What comes after it is named by the step that is done.
STEP = ("data", "agreement", "forward", "backward", "norm", "update")
WORDS = {
    "data": "waiting for the data of step {}",
    "agreement": "the agreement of step {}",
    "forward": "the forward pass of step {}",
    "backward": "the backward pass and gradient reduction of step {}",
    "norm": "the gradient norm of step {}",
    "update": "the weights' update of step {}",
    "callback": "a callback after step {}",
    "saving": "saving a checkpoint after step {}",
    "validation": "the validation after step {}",
    "sample": "writing a sample after step {}",
    "debugger": "a debugger after step {}",
    "elsewhere": "between steps, after step {}",
}
MEETING = "lmforge.parallel.control:"
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class Place(NamedTuple):
    """A point of the run. `waits`: the stack ends inside torch's distributed code."""

    phase: str
    line: str  # of this project or the user's own code: `name.py:12 in function`
    waits: bool

    def position(self, done: int) -> tuple[int, int]:
        """Comparable among ranks, `done` being the steps that this one has finished."""
        return (done + 1, STEP.index(self.phase)) if self.phase in STEP else (done, len(STEP))

    def say(self, done: int) -> str:
        return WORDS[self.phase].format(done + (self.phase in STEP))


def find_place(thread: int) -> Place:
    """Where a thread of this process is, by its ident."""
    frames = list(_inwards(sys._current_frames().get(thread)))
    stack = [f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_name}" for frame in frames]
    lines = zip(reversed(frames), reversed(stack), strict=True)
    own = next((frame for frame, line in lines if _is_own(frame, line)), None)
    fits = (phase for phase, marks in PHASES.items() if any(line.startswith(marks) for line in stack))
    return Place(next(fits, "elsewhere"), _line(own) if own else "?", bool(stack) and _is_distributed(stack[-1]))


def _is_own(frame: FrameType, line: str) -> bool:
    """Not of a library, and not where the ranks of this project meet: who wanted to meet tells more."""
    file = frame.f_code.co_filename
    installed = "site-packages" in file or "dist-packages" in file
    return not installed and not file.startswith((STANDARD_LIBRARY, "<")) and not line.startswith(MEETING)


def _is_distributed(innermost: str) -> bool:
    return innermost.startswith("torch.distributed.")


def stacks() -> str:
    """Every thread's Python stack, the innermost call last. No source file is read: its disk may be what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {ident} ({names.get(ident, 'not of Python')})")
        lines += [f"  {each.f_code.co_filename}:{_line(each).split(':')[-1]}" for each in _inwards(frame)]
    return "\n".join(lines) + "\n"


def _inwards(frame: FrameType | None) -> Iterator[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return reversed(found)


def _line(frame: FrameType) -> str:
    name = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
