"""What a start does not import, and what a step leaves out of Lightning's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fits import fit
from lmforge.data import windows
from tiny import ROOT

# Tenths of seconds each, and nothing a default run needs before its first step. torch._dynamo, and sympy with it, are
# not among them: `import lightning` loads them, and so does torch's own AdamW in any bare loop.
DENIED = ("transformers", "datasets", "matplotlib", "pandas", "pyarrow", "wandb", "tensorboard", "optuna", "onnx")


FIRST_STEP = """
import json, os, sys
from lmforge.start.entry import run_front_door
from train import train

def job(cfg, run):
    from lmforge.tasks.update import UpdateTask

    def leave(self):
        print("imported", json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)

    UpdateTask._count_step = leave
    if os.environ.get("ALSO"):
        __import__(os.environ["ALSO"])
    return train(cfg, run)

run_front_door("train", job, ["train.py", *sys.argv[1:]])
"""


def imported_before_the_first_step(folder: Path, shards: Path, also: str = "") -> list[str]:
    """Modules that `python train.py` has loaded when its first update is done, in a fresh interpreter."""
    words = ["data=tokens", f"data.path={shards}", "trainer.threads=1", "callbacks.checkpoint.monitor=val/loss"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder), "ALSO": also}
    command = [sys.executable, "-c", FIRST_STEP, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    line = next((line for line in done.stdout.splitlines() if line.startswith("imported ")), None)
    assert line is not None, done.stdout + done.stderr
    return json.loads(line.removeprefix("imported "))


def denied(modules: list[str]) -> list[str]:
    return [name for name in DENIED if name in modules]


def test_the_way_to_the_first_step_imports_nothing_slow_that_it_does_not_need(tmp_path, shards) -> None:
    assert denied(imported_before_the_first_step(tmp_path, shards)) == []


def test_the_list_sees_what_is_imported_on_the_way(tmp_path, shards) -> None:
    assert "pyarrow" in denied(imported_before_the_first_step(tmp_path, shards, also="pyarrow"))


def test_a_window_is_not_moved_nor_copied_on_a_cpu(shards) -> None:
    """The very tensors that were built reach the network."""
    built: list[int] = []
    seen: list[int] = []
    build = windows.Windows._together

    def watched(self: windows.Windows, update: int, count: int) -> list[windows.Window]:
        made = build(self, update, count)
        built.extend(batch["input_ids"].data_ptr() for window in made for batch in window["micro_batches"])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows.Windows, "_together", watched)
        patch.setattr("lmforge.tasks.causal_lm.CausalLM.count", _noting(seen))
        fit(shards, "trainer.max_steps=2", "trainer.limit_val_batches=1")
    assert seen
    assert set(seen) <= set(built)


def _noting(seen: list[int]):  # type: ignore[no-untyped-def]
    from lmforge.tasks.causal_lm import CausalLM

    count = CausalLM.count

    def noted(self: CausalLM, batch: dict) -> object:  # type: ignore[type-arg]
        seen.append(batch["input_ids"].data_ptr())
        return count(self, batch)

    return noted
