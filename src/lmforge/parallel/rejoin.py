"""A store of their own for ranks that torchrun starts, first or again.

torchrun's agent keeps one store for all starts, with the addresses that ranks now dead have left in it, and a rank that
comes before its neighbour would connect to those: `connectFullMesh failed ... Connection refused`.
"""

import os
import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

SIZE = 16  # letters of a number
PATIENCE = timedelta(minutes=30)  # torch's own for a group; nodes that are slow to import take minutes


def fresh_store(patience: timedelta = PATIENCE) -> dict[str, Any]:
    """What `init_process_group` needs to use a part of the agent's store that belongs to this start alone; nothing
    where rank 0 opens a store of its own.

    Every rank calls this. Each shows a number of its own and takes the name that rank 0 answers it with, so nothing
    left by earlier starts can be taken for an answer. Raises TimeoutError with the ranks that did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kept = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
    meeting = PrefixStore("lmforge/meeting", kept)
    name = _welcome(meeting, world, patience) if rank == 0 else _join(meeting, rank)
    return {"store": PrefixStore(f"lmforge/{name}", kept), "rank": rank, "world_size": world}


def _join(meeting: Store, rank: int) -> str:
    mine = secrets.token_hex(SIZE // 2)
    meeting.append("arrivals", mine)  # type: ignore[attr-defined]
    name: str = meeting.get(f"welcome/{mine}").decode()
    meeting.set(f"{name}/{rank}", "")
    meeting.add(f"{name}/count", 1)
    return name


def _welcome(meeting: Store, world: int, patience: timedelta) -> str:
    """Answers all arrivals, those of earlier starts too, who are no longer there to hear it, until `world` are in."""
    name, answered = secrets.token_hex(SIZE // 2), 0
    deadline = time.monotonic() + patience.total_seconds()
    meeting.append("arrivals", "")  # type: ignore[attr-defined]
    while meeting.add(f"{name}/count", 0) < world - 1:
        arrivals = meeting.get("arrivals").decode()
        for at in range(answered, len(arrivals), SIZE):
            meeting.set(f"welcome/{arrivals[at : at + SIZE]}", name)
        answered = len(arrivals)
        if time.monotonic() > deadline:
            missing = [str(rank) for rank in range(1, world) if not meeting.check([f"{name}/{rank}"])]
            raise TimeoutError(f"ranks {', '.join(missing)} did not come within {patience.total_seconds():.0f} s")
        time.sleep(0.01)
    return name
