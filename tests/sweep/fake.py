"""A training that needs no torch: its loss is known from its config, and it goes on from where a kill left it."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, signal, sys, time
from lmforge.config.plain import to_plain
from lmforge.start.entry import run_front_door
from lmforge.config.errors import Terminated

asked = []

def job(cfg, run):
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    loss = cfg.optimizer.lr * 100 + cfg.model.n_layer
    steps = run.path / "steps"  # what stands for the checkpoints
    done = int(steps.read_text()) if steps.exists() else 0
    with (run.path / "seen.jsonl").open("a") as seen:
        facts = {"pid": os.getpid(), "from": done, "lr": cfg.optimizer.lr, "cores": sorted(os.sched_getaffinity(0)),
                 "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": cfg.trainer.threads}
        seen.write(json.dumps(facts) + "\\n")
    if not done:
        (run.path / "metrics.csv").write_text("step,val/loss\\n")
    if os.environ.get("FAIL") == run.path.name:
        raise RuntimeError("told to fail")
    for step in range(done + 1, 5):
        with (run.path / "metrics.csv").open("a") as log:
            log.write(f"{step},{loss + 1 / step}\\n")
        steps.write_text(str(step))
        while step == 2 and os.environ.get("HOLD") in (run.path.name, "all"):
            if asked:
                raise Terminated("saved")
            time.sleep(0.01)
    (run.path / "summary.json").write_text(json.dumps({"val/loss": loss, "steps": 10**9}))

run_front_door("train", job)
"""


class Sweep:
    """Command lines of the fake training in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "train.py", *words], cwd=self.folder, env={**os.environ, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __call__(self, *words: str, code: int = 0, **environment: str) -> str:
        process = self.start(*words, **environment)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == code, output
        return output

    @property
    def path(self) -> Path:
        """The one sweep there is."""
        (file,) = self.folder.glob("runs/*/*/sweep.yaml")
        return file.parent

    def table(self) -> list[dict[str, str]]:
        with (self.path / "table.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> list[str]:
        return [row[name] for row in self.table()]

    def kill_when(self, process: subprocess.Popen[str], job: int, jobs_too: bool) -> None:
        """kill -9 to a sweep whose `job` has come half way, and to the job as well."""
        wait_for(lambda: (next(self.folder.glob(f"runs/*/*/{job}/steps"), Path("none"))).exists(), process)
        wait_for(lambda: (self.path / str(job) / "steps").read_text() == "2", process)
        process.kill()
        process.communicate()
        if jobs_too:
            os.kill(int((self.path / str(job) / ".lock").read_text()), signal.SIGKILL)


def wait_for(done, process: subprocess.Popen[str], seconds: float = 30.0) -> None:
    import time

    deadline = time.monotonic() + seconds
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
