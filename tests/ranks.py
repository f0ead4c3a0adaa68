"""Real ranks for tests: processes forked from a server that has already imported torch and lightning.

The server is started once for the whole test session; after that two ranks cost a tenth of a second. Every child is
reaped, also when one of them fails or hangs.
"""

import contextlib
import multiprocessing
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # these ranks never use another; read at the import
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "lightning.pytorch", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor"]
    + [f"lmforge.{name}" for name in ("training.callbacks", "training.summary", "tasks.causal_lm", "evaluation.score")]
    + ["lightning.pytorch.loggers.tensorboard", "lightning.pytorch.loggers.wandb", "deepspeed"]
)


def free_port() -> int:
    """A free port below those that the system hands to outgoing connections, which could take it meanwhile."""
    while True:
        port = secrets.SystemRandom().randrange(15000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(job: Callable[..., Any], world: int, *args: Any, seconds: float = 150.0) -> list[Any]:
    """Call `job(*args)` on `world` ranks as torchrun would start them; their results in order of rank.

    Raises AssertionError with every failed rank's traceback, or its exit code when it died without one.
    """
    port = free_port()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = [
        CONTEXT.Process(target=_rank, args=(job, args, rank, world, port, pipes[rank][1])) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = _collect(processes, [reader for reader, _ in pipes], time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in outcomes]


def _collect(processes: list[Any], readers: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < len(processes) and time.monotonic() < deadline:
        for rank, (process, reader) in enumerate(zip(processes, readers, strict=True)):
            if rank in outcomes:
                continue
            if reader.poll(0.01):
                outcomes[rank] = reader.recv()
            elif not process.is_alive() and not reader.poll(0):
                outcomes[rank] = (False, f"died with exit code {process.exitcode}")
        if any(not ok for ok, _ in outcomes.values()):
            deadline = min(deadline, time.monotonic() + 2.0)  # the others would wait for the dead one
    return [outcomes.get(rank, (False, "did not end in time")) for rank in range(len(processes))]


def _rank(job: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, port: int, pipe: Connection) -> None:
    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    torch.set_num_threads(1)
    rank_zero_only.rank = rank  # read from the environment at import, which the server did without one
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    try:
        outcome = (True, job(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send(outcome)
    os._exit(0)
