"""Ranks that are started again meet each other and not what dead ranks have left in torchrun's store."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lmforge.parallel import control, rejoin
from ranks import run_ranks

LATE = 3.0  # more than gloo goes on trying an address where nobody listens


def meet(port: int, late: int, seconds: float, changed: bool = False) -> list[int]:
    """Connect through the agent's store and gather the ranks' numbers; rank `late` comes `seconds` after the others."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    if changed:
        control.fresh_store = dict  # type: ignore[assignment]
    if dist_rank() == late:
        time.sleep(seconds)
    control.share_object(None)
    gathered: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    return [int(rank) for rank in gathered if rank is not None]


def dist_rank() -> int:
    return int(os.environ["RANK"])


def too_few(port: int) -> str:
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    try:
        rejoin.fresh_store(timedelta(seconds=1))
    except TimeoutError as error:
        return str(error)
    return "came"


@pytest.fixture
def agent() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_starts_that_follow_each_other_do_not_meet(agent) -> None:
    """With other numbers of ranks, whoever is late."""
    for world, late, seconds in ((2, 1, 0.0), (1, 0, 0.0), (3, 2, 0.1), (2, 0, LATE), (2, 1, LATE)):
        assert run_ranks(meet, world, agent.port, late, seconds) == [list(range(world))] * world


def test_without_it_they_would(agent) -> None:
    run_ranks(meet, 2, agent.port, 1, 0.0, True)
    with pytest.raises(AssertionError):
        run_ranks(meet, 2, agent.port, 1, LATE, True, seconds=8)


def test_an_arrival_that_died_before_it_was_answered(agent) -> None:
    left = dist.PrefixStore("lmforge/meeting", agent)
    left.append("arrivals", "0123456789abcdef")
    assert run_ranks(meet, 2, agent.port, 1, 0.1) == [[0, 1]] * 2


def test_who_did_not_come_is_named(agent) -> None:
    assert run_ranks(too_few, 2, agent.port) == ["ranks 2 did not come within 1 s", "came"]
