"""The one place that starts a process group: for every strategy, under every launcher."""

import os
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lmforge.config.connection import ENV, Connection, connection, meeting_point
from lmforge.config.errors import NotConnected, RankLost, UsageError
from lmforge.config.launch import Launch
from lmforge.parallel.meet import meet
from lmforge.parallel.unmet import Meeting, not_connected

# What torch is asked for: beside nccl, which carries GPU tensors only, gloo for what ranks tell each other on the host.
TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
TORCH_BACKENDS = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo", "mpi": "cpu:mpi,cuda:mpi"}


def check_build(backend: str) -> None:
    """Raises UsageError when the installed torch lacks a backend."""
    built = {"mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
    if backend in built and not built[backend]():
        how = "build torch from source beside an MPI" if backend == "mpi" else "install a CUDA or ROCm build of torch"
        raise UsageError(
            f"strategy.process_group_backend={backend}: the installed torch {torch.__version__} was built without "
            f"{backend.upper()}; did you mean gloo?; allowed: auto, gloo; or {how}"
        )


def connect_launched(cfg: Any, launch: Launch) -> None:
    """Connects the ranks that an outer launcher started, before any trainer exists; Lightning uses what it finds."""
    how = connection(cfg)
    address, port = meeting_point(how.init_method, launch, os.environ)
    agent = how.init_method == ENV and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    connect(how, Meeting(address, port, launch.rank, launch.world_size, how.seconds, agent))


def connect(how: Connection, meeting: Meeting) -> None:
    """Starts the process group, if there is none: all ranks meet, then exchange their addresses.

    From then on every group of this process waits `how.seconds` in an exchange. Raises NotConnected within about that
    time when a rank is missing, or cannot be reached.
    """
    if dist.is_initialized():
        return
    check_build(how.backend)
    _wait_at_most(how.seconds)
    store = meet(meeting)
    try:
        dist.init_process_group(
            TORCH_BACKENDS[how.backend], store=store, rank=meeting.rank, world_size=meeting.world,
            timeout=timedelta(seconds=how.seconds),
        )  # fmt: skip
    except RuntimeError as error:
        raise NotConnected(not_connected(meeting, "gloo" if how.backend == "nccl" else how.backend, error)) from error


def first_exchange(how: Connection, meeting: Meeting, device: torch.device) -> None:
    """One number from each rank over the backend that will carry the gradients: NCCL connects only now."""
    one = torch.ones(1, device=device)
    try:
        dist.all_reduce(one)
        ranks = int(one.item())
    except RuntimeError as error:
        raise NotConnected(not_connected(meeting, how.backend, error)) from error
    if ranks != meeting.world:
        raise NotConnected(f"{how.backend} brought {ranks} ranks together, not {meeting.world}")


def no_answer(errors: Iterable[BaseException], how: Connection) -> RankLost | None:
    """What an exchange that ran into its time-out ends with; None for other errors."""
    lines = [line for error in errors for line in str(error).splitlines()]
    first = next((line for line in lines if TIMED_OUT.search(line)), None)
    if first is None:
        return None
    return RankLost(
        f"another rank took no part in an exchange over {how.backend} for {how.seconds:g} s "
        "(strategy.timeout_seconds): it hangs, is far behind, or the network between the machines is cut\n"
        f"  {first.strip()[:300]}"
    )


def _wait_at_most(seconds: float) -> None:
    """The time-out of groups that are made later without saying one, as those of a device mesh are."""
    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)


def write_nccl_log(level: str | None, run: Path, rank: int) -> None:
    """Has NCCL write to a file of this rank in the run folder. To be called before its first exchange."""
    if level is not None:
        folder = str(run.absolute()).replace("%", "%%")
        os.environ["NCCL_DEBUG"] = level
        os.environ["NCCL_DEBUG_FILE"] = f"{folder}/nccl-rank-{rank}-%h-%p.log"
