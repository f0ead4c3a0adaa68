"""Jobs side by side: each has its own devices."""

import os

import pytest

from lmforge.config import machine
from lmforge.config.errors import UsageError
from lmforge.sweep.slots import Slot, make_slots


def plain(devices=1, accelerator="auto"):
    return {"trainer": {"devices": devices, "accelerator": accelerator}}


@pytest.fixture
def gpus(monkeypatch):
    """A machine with four GPUs and eight cores."""
    monkeypatch.setattr(machine, "_driver_gpus", lambda: 4)
    monkeypatch.setattr(machine, "torch_has_gpu_build", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in machine.VISIBLE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("wanted", "devices", "sets"),
    [
        ("auto", 1, [("0",), ("1",), ("2",), ("3",)]),
        ("auto", 2, [("0", "1"), ("2", "3")]),
        ("auto", 3, [None]),
        ("auto", "auto", [None]),
        ("auto", [2, 3], [None]),
        (1, 1, [None]),
        (2, 1, [("0",), ("1",)]),
        (6, 1, [("0",), ("1",), ("2",), ("3",), ("0",), ("1",)]),
    ],
)
def test_each_job_has_gpus_of_its_own(gpus, wanted, devices, sets):
    slots = make_slots(wanted, [plain(1), plain(devices)])
    assert [slot.gpus for slot in slots] == sets
    if len(slots) in (2, 4):
        cores = [core for slot in slots for core in slot.cores]
        assert sorted(cores) == list(range(8))


def test_only_the_gpus_that_are_visible(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [slot.environment for slot in make_slots("auto", [plain()])] == [
        {"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "1"},
    ]  # fmt: skip


@pytest.mark.parametrize("devices", ["auto", [0, 1]])
def test_jobs_that_name_their_gpus_go_one_by_one(gpus, devices):
    with pytest.raises(UsageError, match=r"give trainer\.devices as a number"):
        make_slots(2, [plain(devices)])


def test_too_few_gpus_for_one_of_several(gpus):
    with pytest.raises(UsageError, match="each job wants 5 GPUs, and this process sees 4"):
        make_slots(2, [plain(5)])


@pytest.mark.parametrize(
    ("count", "sets"),
    [
        (1, [()]),
        (2, [(2, 3), (4, 5, 6)]),
        (5, [(2,), (3,), (4,), (5,), (6,)]),
        (6, [(2,), (3,), (4,), (5,), (6,), (2,)]),
    ],
)
def test_core_sets(monkeypatch, count, sets):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5, 6})
    assert [slot.cores for slot in make_slots(count, [plain(accelerator="cpu")])] == sets


def test_on_a_cpu_one_job_at_a_time_unless_told():
    assert make_slots("auto", [plain(4, "cpu")]) == [Slot()]
