"""What the flight recorder says of collectives that are over, that wait, and that have not begun on a GPU."""

import json
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lmforge.parallel import flight
from ranks import run_ranks


def entry(number: int, name: str = "gloo:all_reduce", retired: bool = False, state: str = "scheduled") -> flight.Entry:
    facts = {"process_group": ["0", "default"], "input_sizes": [[2, 3], [4]], "is_p2p": False}
    return {"collective_seq_id": number, "profiling_name": name, "retired": retired, "state": state, **facts}


def test_who_waits() -> None:
    assert flight.waits_in([]) is None
    assert flight.waits_in([entry(1, retired=True)]) is None
    assert flight.waits_in([entry(1, retired=True), entry(2), entry(3)]) == "gloo:all_reduce number 2 of 10 values"
    given = entry(4, "nccl:all_reduce")  # the GPU has not come to it: it may be busy with this rank's own work
    assert flight.waits_in([given]) is None
    assert flight.waits_in([given | {"state": "started"}]) == "nccl:all_reduce number 4 of 10 values"
    assert flight.reached([entry(1), given, entry(5)]) == {"gloo 0": 5, "nccl 0": 4}


def test_two_recorders_in_order_of_time(monkeypatch) -> None:
    """A GPU's ranks have both; what is older waits first, whichever backend it is of."""

    def recorder(*entries: flight.Entry) -> Callable[[bool, bool], bytes]:
        return lambda collectives, active: json.dumps({"entries": entries}).encode()

    gloo, nccl = entry(9), entry(4, "nccl:all_reduce", state="started")
    late, early = gloo | {"time_created_ns": 7}, nccl | {"time_created_ns": 3}
    monkeypatch.setattr(flight.c10d, "_dump_fr_trace_json", recorder(late))
    monkeypatch.setattr(flight.c10d, "_dump_nccl_trace_json", recorder(early, early | {"is_p2p": True}), raising=False)
    assert flight.recorded() == [early, late]
    assert flight.waits_in(flight.recorded()) == "nccl:all_reduce number 4 of 10 values"


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)


def two_ranks() -> tuple[str | None, dict[str, int]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    wait_until(lambda: flight.waits_in(flight.recorded()) is None)
    late = threading.Thread(target=dist.all_reduce, args=(torch.ones(2, 5),))
    if rank == 0:
        late.start()
        wait_until(lambda: flight.waits_in(flight.recorded()) is not None)
    entries = flight.recorded()
    found = flight.waits_in(entries), flight.reached(entries)
    if rank == 1:
        time.sleep(0.5)  # until the other has looked
        late.start()
    late.join()
    dist.destroy_process_group()
    return found


def test_two_real_ranks_one_of_which_waits() -> None:
    (waits, reached), (idle, behind) = run_ranks(two_ranks, 2)
    assert waits == "gloo:all_reduce number 2 of 10 values"
    assert (idle, reached, behind) == (None, {"gloo 0": 2}, {"gloo 0": 1})


def one_gpu() -> list[str]:
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(3, device="cuda"))
    torch.cuda.synchronize()
    names = [entry["profiling_name"] for entry in flight.recorded()]
    dist.destroy_process_group()
    return names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA GPU")
def test_nccl_is_recorded_too() -> None:
    assert "nccl:all_reduce" in run_ranks(one_gpu, 1)[0]
