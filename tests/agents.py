"""torchrun's own agents on this machine, each a node of its own, with workers forked from what has torch imported.

A fresh interpreter for each worker would take half a minute of imports on a busy machine; here one takes a second. The
agents, their rendezvous, their signals and restarts are torch's, unchanged.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commands import ROOT
from lmforge.start.launch_command import SETTINGS
from ranks import CONTEXT, free_port


class Agent:
    """An agent at work: a process with its workers as children."""

    def __init__(self, words: Sequence[str], folder: Path, changes: Sequence[Callable[[], None]], **launch: object):
        self.log = folder / f"agent-{time.monotonic_ns()}.log"
        self.process = CONTEXT.Process(target=_agent, args=(list(words), str(folder), changes, launch, str(self.log)))
        self.process.start()

    def workers(self) -> list[int]:
        """Process numbers of the living workers in order of rank."""
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = file.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    found.append(int(file.parent.name))
        return sorted(found, key=_rank)

    def kill_node(self) -> None:
        """SIGKILL to the agent and its workers at once, as when the machine goes down."""
        for pid in (*self.workers(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid or 0, signal.SIGKILL)
        self.process.join()

    def finish(self, seconds: float = 120.0) -> int:
        """Its exit code; an agent that hangs is killed with its workers and fails the test."""
        self.process.join(seconds)
        hung = self.process.is_alive()
        if hung:
            self.kill_node()
        assert not hung, f"the agent did not end in {seconds} s:\n{self.output}"
        return int(self.process.exitcode or 0)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def wait_for(done: Callable[[], object], agents: Sequence[Agent], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        hopeless = time.monotonic() > deadline or not any(agent.process.is_alive() for agent in agents)
        assert not hopeless, "\n".join(agent.output for agent in agents)
        time.sleep(0.02)


def rendezvous() -> dict[str, object]:
    """What agents of one job share, as `--rdzv-backend=c10d --rdzv-endpoint=... --rdzv-id=job` gives it."""
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 1}
    return {"rdzv_endpoint": f"127.0.0.1:{free_port()}", "rdzv_configs": settings, "run_id": "job"}


def _rank(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        variables = Path(f"/proc/{pid}/comm")
        return int(variables.read_text().rpartition("-")[2])
    return -1


def _agent(words: list[str], folder: str, changes: Sequence[Callable[[], None]], launch: dict, log: str) -> None:
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.chdir(folder)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **SETTINGS,
    }
    host = launch.pop("host", None)
    if host is not None:
        launch["rdzv_configs"] = {**launch["rdzv_configs"], "is_host": host}
    config = LaunchConfig(rdzv_backend="c10d", local_addr="127.0.0.1", start_method="fork", **launch)
    close = MultiprocessContext._close

    def _close(context: Any, **how: Any) -> None:
        """A forked worker that has ended waits for this event, which the agent sets only when all have; a command's
        process would just end."""
        context._worker_finished_event.set()
        close(context, **how)

    MultiprocessContext._close = _close  # type: ignore[method-assign]
    elastic_launch(config, _worker)(words, list(changes))


def _worker(words: list[str], changes: Sequence[Callable[[], None]]) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    ctypes.CDLL(None).prctl(1, 0)  # a forked worker is told to end with its agent, a command's process is not
    rank_zero_only.rank = int(os.environ["RANK"])  # read at import, which was in another process
    Path("/proc/self/comm").write_text(f"rank-{os.environ['RANK']}")
    for change in changes:
        change()
    sys.argv = [str(ROOT / words[1]), *words[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
