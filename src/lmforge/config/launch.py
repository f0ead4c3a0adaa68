"""Who started this process, read from the environment before torch is."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmforge.config.errors import Exit, UsageError

RUN_VARIABLE = "LMFORGE_RUN"
CONFIG_VARIABLE = "LMFORGE_CONFIG"
LAUNCH_VARIABLE = "LMFORGE_LAUNCH"  # holds "hand" once rank variables that no launcher set were found to be meant
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", LAUNCH_VARIABLE)
OUTCOME_VARIABLE = "LMFORGE_OUTCOME"  # the file in which `lmforge launch` wants to read how the run ended
ORPHAN_SECONDS = 10.0  # what a child may still need when its parent has ended
INTERACTIVE = ("bash", "sh", "zsh", "interactive")


@dataclass(frozen=True)
class Launch:
    """`none`: started by hand, or as a sweep's job. `child`: relaunched by Lightning on the same machine.
    `torchrun` and `slurm`: one of several processes that an outer launcher started; ranks come from it. `hand`: ranks
    come from RANK and WORLD_SIZE, set by whoever typed strategy.init_method with them."""

    kind: Literal["none", "child", "torchrun", "slurm", "hand"] = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    job: str | None = None  # torchrun's name for all starts of the ranks that belong together, `none` without --rdzv-id
    restarts: int = 0  # how often torchrun has started the ranks again; a change of nodes does not count

    @property
    def external(self) -> bool:
        """Devices and nodes are the launcher's, not the config's."""
        return self.kind in ("torchrun", "slurm", "hand")

    @property
    def name(self) -> str:
        """What gave the ranks, in words."""
        return {"slurm": "srun", "hand": "RANK and WORLD_SIZE"}.get(self.kind, self.kind)


def plain_environment(launch: Launch) -> bool:
    """True when only this program starts processes, on this machine, whatever a cluster's variables say: the shell of
    a Slurm allocation has SLURM_NTASKS set and is still one process."""
    return launch.kind in ("none", "child")


def read_launch(environ: MutableMapping[str, str] | None = None, by_hand: bool = False) -> tuple[Launch, str | None]:
    """The launch, and a warning when leftover rank variables of another launcher had to be removed from `environ`.

    `by_hand`: the command line says how ranks meet, so RANK and WORLD_SIZE are no leftovers; noted in `environ`.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TORCHELASTIC_RUN_ID") and environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _torchrun(environ), None
    typed = by_hand and not environ.get(RUN_VARIABLE) and not _is_slurm_task(environ)
    if environ.get(LAUNCH_VARIABLE) == "hand" or (typed and (environ.get("RANK") or environ.get("WORLD_SIZE"))):
        return _hand(environ), None
    if environ.get(RUN_VARIABLE) and environ.get("LOCAL_RANK"):
        local = _number(environ, "LOCAL_RANK")
        world = _number(environ, "WORLD_SIZE", local + 1)
        return Launch("child", _number(environ, "RANK", local), world, local, world), None
    if _is_slurm_task(environ):
        return _slurm(environ), _remove_strays(environ, RANK_VARIABLES)
    return Launch(), _remove_strays(environ, (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"))


def _hand(environ: MutableMapping[str, str]) -> Launch:
    """All ranks are on this machine unless LOCAL_WORLD_SIZE says how many are."""
    lacking = [name for name in ("RANK", "WORLD_SIZE") if not environ.get(name)]
    if lacking:
        raise UsageError(f"{lacking[0]} is not set; ranks started by hand need both RANK and WORLD_SIZE")
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    each = max(1, _number(environ, "LOCAL_WORLD_SIZE", world))
    launch = _checked(Launch("hand", rank, world, _number(environ, "LOCAL_RANK", rank % each), each, world // each))
    environ[LAUNCH_VARIABLE] = "hand"
    return launch


def _torchrun(environ: Mapping[str, str]) -> Launch:
    world = _number(environ, "WORLD_SIZE")
    local_world = _number(environ, "LOCAL_WORLD_SIZE", world)
    return _checked(
        Launch(
            "torchrun",
            _number(environ, "RANK"),
            world,
            _number(environ, "LOCAL_RANK", 0),
            local_world,
            max(1, world // max(1, local_world)),
            environ["TORCHELASTIC_RUN_ID"],
            _number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        )
    )


def job_of(launch: Launch) -> str | None:
    """What is the same for all starts of the ranks of one torchrun job, and for no other job: the id it was given, else
    the agent that starts this process. None for other launchers."""
    if launch.job != "none":
        return launch.job
    agent, began = os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"agent {socket.gethostname()} {agent} {began}".rstrip()


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """True inside one of several `srun` tasks; an allocation's shell or a batch script is a single process."""
    if environ.get("SLURM_JOB_NAME") in INTERACTIVE:
        return False
    if not environ.get("SLURM_PROCID") or not environ.get("SLURM_STEP_ID"):
        return False
    return _slurm_tasks(environ) > 1


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))


def _slurm(environ: Mapping[str, str]) -> Launch:
    world = _slurm_tasks(environ)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", 0)
    return _checked(Launch("slurm", rank, world, local, max(1, world // max(1, nodes)), nodes))


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.rank < launch.world_size:
        raise UsageError(f"{launch.name} gave rank {launch.rank} of a world of {launch.world_size} processes")
    if launch.local_world_size * launch.num_nodes != launch.world_size:
        raise UsageError(
            f"{launch.name} gave {launch.world_size} processes on {launch.num_nodes} nodes; "
            "each node must hold the same number"
        )
    return launch


def _remove_strays(environ: MutableMapping[str, str], names: Sequence[str]) -> str | None:
    found = [f"{name}={environ.pop(name)}" for name in names if name in environ]
    if not found:
        return None
    return (
        f"ignored {' '.join(found)}: variables of ranks, but neither torchrun nor srun started this; if they are "
        "meant, type strategy.init_method=env:// or tcp://HOST:PORT"
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text}: the launcher's variable must hold a whole number") from None


def note_outcome(code: int | None) -> None:
    """Tell `lmforge launch`, if that started the launcher, how this run ended: a launcher has codes of its own. None =
    it is at work."""
    if file := os.environ.get(OUTCOME_VARIABLE):
        with suppress(OSError):
            Path(file).write_text("" if code is None else f"{int(code)}\n", encoding="utf-8")


def end_with_parent(grace: float = ORPHAN_SECONDS) -> None:
    """Ends this process `grace` seconds after the one that started it, without which it could wait half an hour to
    connect."""
    threading.Thread(target=_outlive, args=(os.getppid(), grace), name="parent-watch", daemon=True).start()


def _outlive(parent: int, grace: float) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(grace)
    os._exit(int(Exit.FAILED))
