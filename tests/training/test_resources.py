"""CPU time and memory of all ranks together."""

import time
from typing import Any

import torch

from lmforge.parallel.control import Control
from lmforge.training import resources
from lmforge.training.resources import Resources, cpu_seconds, peak_memory_bytes
from ranks import run_ranks

CPU = torch.device("cpu")


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def used(share: float) -> tuple[Resources, float, int]:
    """One rank's view, and what it has used itself."""
    torch.distributed.init_process_group("gloo")
    burn(share * (1 + torch.distributed.get_rank()))
    mine, memory = cpu_seconds(), peak_memory_bytes(CPU)
    return Resources.gather(Control(), CPU), mine, memory


def test_cpu_time_is_summed_and_memory_is_the_largest() -> None:
    (first, cpu, memory), (second, more_cpu, more_memory) = run_ranks(used, 2, 0.1)
    assert abs(first.cpu - (cpu + more_cpu)) < 0.1
    assert first.cpu == second.cpu
    assert first.memory == second.memory >= max(memory, more_memory)
    assert abs(first.memory - max(memory, more_memory)) < 2**24


def test_what_comes_after_is_added(monkeypatch) -> None:
    now: dict[bool, float] = {True: 5.0, False: 4.0}
    monkeypatch.setattr(resources, "cpu_seconds", lambda children=True: now[children])
    alone = Resources.gather(Control(), CPU)
    together = Resources(memory=1, cpu=9.0, mine=4.0, alone=False)
    now |= {True: 8.0, False: 4.5}
    assert (alone.cpu_now(), together.cpu_now()) == (8.0, 9.5)


def test_memory_is_asked_of_the_device_that_computes(monkeypatch) -> None:
    """A GPU that is there but not used says nothing about a run on the CPU."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 7)
    assert peak_memory_bytes(CPU) > 2**20
    assert peak_memory_bytes(torch.device("cuda:1")) == 7
    assert asked == [torch.device("cuda:1")]
