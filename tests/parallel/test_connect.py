"""The process group: what it talks over, how long it waits, and what is said when it cannot be made."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmforge.config.connection import Connection
from lmforge.config.errors import NotConnected, UsageError
from lmforge.config.launch import Launch
from lmforge.parallel import connect as connecting
from lmforge.parallel.connect import check_build, connect, connect_launched, first_exchange
from lmforge.parallel.control import Control
from lmforge.parallel.unmet import Meeting
from ranks import free_port, run_ranks

GLOO = Connection("gloo", "env://", 20.0, None)


def here(seconds: float = 20.0) -> Meeting:
    environ = os.environ
    return Meeting(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["RANK"]), 2, seconds)


@pytest.mark.parametrize("backend", ["mpi", "nccl"])
def test_a_backend_that_torch_was_built_without(monkeypatch, backend) -> None:
    monkeypatch.setattr(dist, f"is_{backend}_available", lambda: False)
    with pytest.raises(UsageError, match=rf"process_group_backend={backend}: the installed torch .* without .*gloo"):
        check_build(backend)
    monkeypatch.setattr(dist, f"is_{backend}_available", lambda: True)
    check_build(backend)
    check_build("gloo")


def connected() -> list[Any]:
    connect(GLOO, here())
    connect(GLOO, here())  # what an outer launcher's ranks do again when the trainer starts
    first_exchange(GLOO, here(), torch.device("cpu"))
    control = Control()
    control.barrier()
    assert control.group is not None
    waits = control.group._get_backend(torch.device("cpu")).options._timeout
    return [dist.get_backend(control.group), dist.get_world_size(), waits]


def test_ranks_are_connected_once_and_later_groups_wait_as_long() -> None:
    assert run_ranks(connected, 2) == [["gloo", 2, timedelta(seconds=20)]] * 2


def waits_in_vain() -> tuple[str, float]:
    connect(Connection("gloo", "env://", 1.0, None), here(20.0))
    control = Control()
    began = time.monotonic()
    if int(os.environ["RANK"]):
        time.sleep(3.0)
        return "", 0.0
    with pytest.raises(RuntimeError) as error:
        control.barrier()
    return str(error.value), time.monotonic() - began


def test_an_exchange_ends_with_the_time_out() -> None:
    (said, seconds), _ = run_ranks(waits_in_vain, 2)
    assert "Timed out waiting 1000ms" in said
    assert seconds < 2.9


def no_interface() -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    with pytest.raises(NotConnected) as error:
        connect(GLOO, here())
    return str(error.value)


def test_an_interface_that_is_not_there() -> None:
    for rank, said in enumerate(run_ranks(no_interface, 2)):
        assert said.startswith(f"rank {rank} of 2 met the others at 127.0.0.1:")
        assert "gloo could not connect them: " in said
        assert "tried      GLOO_SOCKET_IFNAME=nowhere0, NCCL_SOCKET_IFNAME is not set; " in said
        assert "check      GLOO_SOCKET_IFNAME names the interface that reaches the other machines" in said


def too_few() -> str:
    connect(GLOO, here())
    with pytest.raises(NotConnected) as error:
        first_exchange(Connection("mpi", "env://", 20.0, None), Meeting("", 0, 0, 3, 20.0), torch.device("cpu"))
    return str(error.value)


def test_a_backend_that_brings_other_ranks_together() -> None:
    assert run_ranks(too_few, 2) == ["mpi brought 2 ranks together, not 3"] * 2


def test_an_error_of_nccl_says_where_to_look(monkeypatch) -> None:
    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("NCCL error: unhandled system error\nmore")

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(NotConnected) as error:
        first_exchange(Connection("nccl", "env://", 20.0, None), Meeting("h", 1, 1, 2, 20.0), torch.device("cpu"))
    first, _, check, _ = str(error.value).splitlines()
    assert (
        first
        == "rank 1 of 2 met the others at h:1, but nccl could not connect them: NCCL error: unhandled system error"
    )
    assert "NCCL_SOCKET_IFNAME names the interface" in check
    assert "strategy.nccl_debug=INFO tells more" in check


@pytest.mark.parametrize(
    ("init_method", "agent", "expected"),
    [
        ("env://", "", Meeting("host", 7, 1, 2, 9.0, False)),
        ("env://", "True", Meeting("host", 7, 1, 2, 9.0, True)),
        ("tcp://other:8", "True", Meeting("other", 8, 1, 2, 9.0, False)),
    ],
)
def test_ranks_of_a_launcher_meet_where_it_or_the_command_says(monkeypatch, init_method, agent, expected) -> None:
    os.environ |= {"MASTER_ADDR": "host", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": agent}
    met: list[Meeting] = []
    monkeypatch.setattr(connecting, "connect", lambda how, meeting: met.append(meeting))
    strategy = {"kind": "ddp", "init_method": init_method, "timeout_seconds": 9}
    cfg = {"strategy": strategy, "trainer": {"accelerator": "cpu"}}
    connect_launched(cfg, Launch("torchrun", 1, 2, 1, 2, 1))
    assert met == [expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA GPU")
def test_nccl_connects_and_writes_its_file(tmp_path) -> None:
    how = Connection("nccl", "env://", 60.0, "INFO")
    connecting.write_nccl_log(how.nccl_debug, tmp_path, 0)
    meeting = Meeting("127.0.0.1", free_port(), 0, 1, 60.0)
    connect(how, meeting)
    try:
        first_exchange(how, meeting, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()
    (file,) = tmp_path.glob("nccl-rank-0-*.log")
    assert "NCCL INFO" in file.read_text()
