"""Memory that is held for reuse goes back to the system when it is asked for, and only then."""

import ctypes
import gc
import resource

import pytest
import torch

from fits import fit
from lmforge.training import memory
from lmforge.training.memory import give_back


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_blocks_go_back_to_the_system() -> None:
    blocks = [bytes(4000) for _ in range(20000)]
    last = blocks[-1]  # keeps the heap from shrinking by itself
    held = resident()
    del blocks
    gc.collect()
    give_back(torch.device("cpu"))
    assert held - resident() > 60e6
    assert len(last) == 4000


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [2, 4]), (5, [5])])
def test_at_the_steps_asked_for(shards, monkeypatch, every, steps) -> None:
    given: list[str] = []
    monkeypatch.setattr(memory, "give_back", lambda device: given.append(device.type))
    fit(shards, f"callbacks.memory.empty_cache_every_n_steps={every}", "trainer.max_steps=5", "callbacks.samples=null")
    assert given == ["cpu"] * len(steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a CUDA device has such a cache")
def test_a_gpus_cache_is_emptied() -> None:
    torch.empty(1 << 26, device="cuda")
    held = torch.cuda.memory_reserved()
    give_back(torch.device("cuda"))
    assert torch.cuda.memory_reserved() < held
