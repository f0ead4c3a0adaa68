"""Who meets where, and what is said when ranks do not: who lacks, what was tried, what to check."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Meeting:
    """A rank on its way to the others. `agent`: torchrun holds the store and has given out the ranks."""

    address: str
    port: int
    rank: int
    world: int
    seconds: float
    agent: bool = False

    @property
    def point(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Here:
    """What a rank leaves in the store."""

    rank: int
    world: int
    pid: int
    host: str
    home: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def missing_ranks(meeting: Meeting, missing: list[int], here: Iterable[Here]) -> str:
    came = ", ".join(map(str, list(here)[:4])) or f"rank {meeting.rank}"
    return "\n".join(
        [
            f"{some_ranks(missing)} of {meeting.world} did not come to {meeting.point} within {meeting.seconds:g} s",
            f"  there      {came}{' and others' if meeting.world - len(missing) > 4 else ''}",
            f"  tried      {_listening(meeting)}; {interfaces()}",
            f"  check      are they started, each with its own RANK and all with WORLD_SIZE={meeting.world}?",
            "             is the address the same on all (MASTER_ADDR and MASTER_PORT, or strategy.init_method)?",
            f"             can their machines reach it (a firewall? `nc -vz {meeting.address} {meeting.port}`)?",
            "             do they need longer to start? strategy.timeout_seconds",
        ]
    )


def unreachable(meeting: Meeting, why: str) -> str:
    return "\n".join(
        [
            f"rank {meeting.rank} of {meeting.world} did not reach rank 0 at {meeting.point} within "
            f"{meeting.seconds:g} s: {why}",
            f"  tried      {meeting.address}, which means {_addresses(meeting.address)}, from {socket.gethostname()}; "
            f"{interfaces()}",
            f"  check      is rank 0 running, on {meeting.address}, with port {meeting.port}?",
            "             is the address the same on all (MASTER_ADDR and MASTER_PORT, or strategy.init_method)?",
            f"             can this machine reach it (a firewall? `nc -vz {meeting.address} {meeting.port}`)?",
            "             does rank 0 need longer to start? strategy.timeout_seconds",
        ]
    )


def not_connected(meeting: Meeting, backend: str, error: Exception) -> str:
    host = socket.gethostname()
    first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    more = "; strategy.nccl_debug=INFO tells more" if backend == "nccl" else ""
    return "\n".join(
        [
            f"rank {meeting.rank} of {meeting.world} met the others at {meeting.point}, but {backend} could not "
            f"connect them: {first}",
            f"  tried      {interfaces()}; {host} means {_addresses(host)}",
            f"  check      {variable} names the interface that reaches the other machines (`ip -brief address`){more}",
            "             a firewall between the machines lets every port through, not only that of rank 0",
        ]
    )


def other_world(meeting: Meeting, wrong: list[Here]) -> str:
    listed = ", ".join(f"{other} {other.world}" for other in wrong[:4])
    return f"WORLD_SIZE differs: rank 0 has {meeting.world}, {listed}; it must be the same number for all"


def some_ranks(missing: list[int]) -> str:
    listed = ", ".join(map(str, missing[:8]))
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"rank{'s'[: len(missing) != 1]} {listed}{more}"


def _listening(meeting: Meeting) -> str:
    if meeting.agent or meeting.rank != 0:
        return f"the store at {meeting.point}"
    elsewhere = "" if _is_local(meeting.address) else f", which {meeting.address} is not an address of"
    return f"rank 0 listens on port {meeting.port} of {socket.gethostname()}{elsewhere}"


def _is_local(name: str) -> bool:
    def bound(address: str) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
        return False

    return any(map(bound, _resolved(name)))


def _addresses(name: str) -> str:
    return " and ".join(_resolved(name)) or "nothing: the name is unknown here"


def _resolved(name: str) -> list[str]:
    with suppress(OSError):
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    return []


def interfaces() -> str:
    """The network interfaces that the environment names for the exchange itself."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return ", ".join(f"{name}={os.environ[name]}" if os.environ.get(name) else f"{name} is not set" for name in names)
