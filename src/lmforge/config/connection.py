"""How the ranks of a run find each other: the words for it, and the place where they meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmforge.config import machine
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.config.nearest import did_you_mean

# The keys of configs/strategy/_connect.yaml, which every strategy has. A job of one process, and a run that was stored
# before there were such keys, mean these.
DEFAULTS: dict[str, Any] = {
    "process_group_backend": "auto",
    "init_method": "env://",
    "timeout_seconds": 1800.0,
    "nccl_debug": None,
}
ENV = "env://"
TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_.-]+):(\d{1,5})/?")
NEAR_TCP = re.compile(r"(?:\w*:?/{1,3})?([A-Za-z0-9_.-]+):(\d{1,5})/?")


@dataclass(frozen=True)
class Connection:
    """The words of a run, `auto` decided. `seconds`: how long ranks wait for each other, at the start and later."""

    backend: str  # nccl | gloo | mpi
    init_method: str
    seconds: float
    nccl_debug: str | None

    def __str__(self) -> str:
        return f"{self.backend} ({self.init_method})"


def connection(cfg: Any) -> Connection:
    """The words of a checked config."""
    words = {**DEFAULTS, **dict(cfg["strategy"])}
    backend = words["process_group_backend"]
    if backend == "auto":
        backend = "nccl" if machine.accelerator(cfg["trainer"]["accelerator"]) == "gpu" else "gloo"
    return Connection(backend, words["init_method"], float(words["timeout_seconds"]), words["nccl_debug"])


def check_connection(cfg: Any) -> list[str]:
    """Refuses a backend that cannot carry this run's tensors; notes on what the words cost."""
    how, notes = connection(cfg), []
    on_gpu = machine.accelerator(cfg["trainer"]["accelerator"]) == "gpu"
    if how.backend == "nccl" and not on_gpu:
        raise UsageError(
            "strategy.process_group_backend=nccl: carries GPU tensors only, and this run is on the CPU; did you mean "
            "gloo?; allowed here: auto, gloo, mpi"
        )
    if how.backend == "gloo" and on_gpu:
        notes.append("strategy.process_group_backend=gloo: slow between GPUs, every message goes through the host")
    if how.nccl_debug and how.backend != "nccl":
        notes.append(f"strategy.nccl_debug={how.nccl_debug}: no file is written, this run talks over {how.backend}")
    return notes


def check_init_method(cfg: Any) -> None:
    text = connection(cfg).init_method
    if text == ENV or ((found := TCP.fullmatch(text)) and 0 < int(found[2]) < 65536):
        return
    near = NEAR_TCP.fullmatch(text)
    if near and 0 < int(near[2]) < 65536:
        hint = did_you_mean(f"tcp://{near[1]}:{near[2]}")
    else:
        hint = did_you_mean(ENV if text.startswith("env") else "tcp://HOST:PORT")
    raise UsageError(
        f"strategy.init_method={text}: not allowed{hint}; allowed: env://, tcp://HOST:PORT with a port from 1 to 65535"
    )


def typed_by_hand(words: list[str]) -> bool:
    """Whether a command line says how ranks meet, so that RANK and WORLD_SIZE beside it are meant."""
    return any(word.lstrip("+").startswith("strategy.init_method=") for word in words)


def meeting_point(init_method: str, launch: Launch, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the ranks that an outer launcher started meet. Raises UsageError when nobody says it."""
    if found := TCP.fullmatch(init_method):
        return found[1].strip("[]"), int(found[2])
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if launch.kind == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
        address, port = address or first_host(nodes), port or str(_slurm_port(environ))
    lacking = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if lacking:
        raise UsageError(
            f"strategy.init_method=env://: {launch.name} set no {' and no '.join(lacking)}, so ranks do not know where "
            "to meet; set them, or strategy.init_method=tcp://HOST:PORT"
        )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"MASTER_PORT={port}: must be a port from 1 to 65535")
    return address, int(port)


def _slurm_port(environ: Mapping[str, str]) -> int:
    """The same for all tasks of a step, and hardly one of another step or job on the machine."""
    job, step = (re.sub(r"\D", "", environ.get(name, "")) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 15000 + (int(job) + 101 * int(step)) % 10000


def first_host(nodes: str) -> str:
    """`node[01-03,07],other` -> node01, as Slurm writes a list of machines."""
    first = re.split(r",(?![^\[]*\])", nodes.strip())[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
