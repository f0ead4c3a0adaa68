"""Where a thread is, read off its stack, and the order of places among ranks."""

import threading
from collections.abc import Callable

import pytest
import torch

from lmforge.training.stall_place import PHASES, STEP, WORDS, Place, find_place, stacks


def place_of(act: Callable[[threading.Event], None]) -> Place:
    """Where a thread is that has begun to `act` and waits for the event in there."""
    arrived, leave = threading.Event(), threading.Event()

    def wait(*args: object) -> None:
        arrived.set()
        leave.wait(10)

    thread = threading.Thread(target=act, args=(wait,))
    thread.start()
    assert arrived.wait(10)
    assert thread.ident is not None
    place = find_place(thread.ident)
    leave.set()
    thread.join()
    return place


def named(module: str, function: str, inner: Callable[[], None]) -> None:
    """Call `inner` from a function of that name in a module of that name."""
    space = {"__name__": module, "inner": inner}
    exec(compile(f"def {function}():\n    inner()\n", f"/src/{module}.py", "exec"), space)
    space[function]()


@pytest.mark.parametrize(
    ("module", "function", "phase"),
    [
        ("lmforge.data.module", "__iter__", "data"),
        ("lmforge.parallel.control", "agree", "agreement"),
        ("lmforge.parallel.control", "gather", "elsewhere"),
        ("lmforge.tasks.update", "training_step", "forward"),
        ("lmforge.tasks.update", "_finish", "update"),
        ("lmforge.training.saving", "settle", "saving"),
        ("lightning.pytorch.loops.evaluation_loop", "run", "validation"),
        ("lightning.pytorch.trainer.call", "_call_callback_hooks", "callback"),
        ("pdb", "interaction", "debugger"),
        ("somewhere", "agree", "elsewhere"),
    ],
)
def test_a_phase_is_told_by_module_and_function(module, function, phase) -> None:
    assert place_of(lambda wait: named(module, function, wait)).phase == phase


def test_the_innermost_own_line_is_named_not_the_library_it_waits_in() -> None:
    place = place_of(lambda wait: wait())
    assert place.line.startswith("test_stall_place.py:")
    assert place.line.endswith(" in wait")
    assert not place.waits


def test_saving_inside_a_step_is_saving() -> None:
    nested = lambda wait: named(  # noqa: E731
        "lmforge.tasks.update", "training_step", lambda: named("lmforge.training.saving", "let_change", wait)
    )
    assert place_of(nested).phase == "saving"


def test_a_real_backward_pass() -> None:
    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, wait):
            ctx.wait = wait
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.wait()
            return gradient, None

    def act(wait) -> None:
        x = torch.ones(2, requires_grad=True)
        named("lmforge.tasks.update", "training_step", lambda: Waiting.apply(x, wait).sum().backward())

    assert place_of(act).phase == "backward"


def spin(leave: list[int]) -> None:
    space = {"__name__": "torch.distributed.somewhere", "leave": leave}
    exec("def recv():\n    while not leave: pass\n", space)
    space["recv"]()


def test_who_ends_in_torchs_distributed_code_waits() -> None:
    leave: list[int] = []
    thread = threading.Thread(target=spin, args=(leave,))
    thread.start()
    try:
        assert any(find_place(thread.ident or 0).waits for _ in range(1000))
    finally:
        leave.append(1)
        thread.join()


def test_a_thread_that_is_gone() -> None:
    assert find_place(-1) == Place("elsewhere", "?", False)


def test_order_and_words() -> None:
    done = 41
    order = [Place(phase, "", False).position(done) for phase in ("callback", *STEP)]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    assert Place("saving", "", False).position(done) == Place("callback", "", False).position(done)
    assert Place("data", "", False).say(done) == "waiting for the data of step 42"
    assert Place("saving", "", False).say(done) == "saving a checkpoint after step 41"
    assert set(WORDS) == {*PHASES, "elsewhere"}


def test_all_threads_are_in_the_stacks() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, args=(10,), name="a-worker")
    thread.start()
    text = stacks()
    leave.set()
    thread.join()
    assert "(a-worker)\n" in text
    assert "(MainThread)\n" in text
    assert "test_stall_place.py:" in text
