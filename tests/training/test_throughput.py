"""Throughput by a fake clock, the two warnings about data, and the machine's peak."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fits import fit
from lmforge.data.packing import PackedRows
from lmforge.parallel.control import Control
from lmforge.tasks.update import UpdateTask
from lmforge.training import peak, throughput
from lmforge.training.peak import matmul_peak
from lmforge.training.throughput import Throughput
from tiny import metrics

CPU = torch.device("cpu")


class Clock:
    """A run of steps of 1 s and 1000 tokens, each after 0.25 s of waiting, with validations of 50 s where asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any):
        settings = {"warmup_steps": 2, "every_n_steps": 2, "peak_flops": 1e6, **options}
        self.speed = Throughput(**settings)
        self.now, self.step = 0.0, 0
        self.loader = SimpleNamespace(wait_seconds=0.0, build_seconds=0.0, samples=0)
        self.logged: list[dict[str, float]] = []
        self.validating: tuple[int, ...] = ()
        self.task = UpdateTask.__new__(UpdateTask)
        self.task.__dict__ |= {"tokens": 0, "control": Control(), "round": None}
        monkeypatch.setattr(UpdateTask, "validates", lambda task, step: step in self.validating)
        monkeypatch.setattr(throughput.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(throughput, "log", lambda trainer, values, step: self.logged.append(values))

    @property
    def trainer(self) -> Any:
        return SimpleNamespace(
            global_step=self.step,
            datamodule=SimpleNamespace(train_loader=self.loader, faster="try data.num_workers"),
            strategy=SimpleNamespace(root_device=CPU),
        )

    def run(self, steps: int, validating: tuple[int, ...] = ()) -> Throughput:
        self.validating = validating
        for _ in range(steps):
            self.now += 0.25
            self.loader.wait_seconds += 0.25
            self.speed.on_train_batch_start(self.trainer, self.task)
            self.now += 1.0
            self.step += 1
            self.task.__dict__["tokens"] += 1000
            self.speed.on_train_batch_end(self.trainer, self.task)
            if self.step in validating:
                self.now += 50.0
        self.speed.on_train_end(self.trainer, self.task)
        return self.speed


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_wait_but_the_first_counts_however_often_it_is_logged(monkeypatch, every) -> None:
    speed = Clock(monkeypatch, every_n_steps=every).run(12)
    assert speed.tokens == 10_000  # the first two steps warm up
    assert speed.seconds == pytest.approx(10 * 1.0 + 9 * 0.25)
    assert speed.data_wait_share == pytest.approx(9 * 0.25 / 12.25)
    assert speed.tokens_per_second == pytest.approx(10_000 / 12.25)


def test_ranks_that_train_apart_are_timed_from_a_meeting_on(monkeypatch) -> None:
    """Before it the counts are one rank's own."""
    clock = Clock(monkeypatch, every_n_steps=4)
    clock.task.__dict__["round"] = SimpleNamespace(steps=1)
    clock.run(3)
    clock.task.__dict__["round"].steps = 0
    assert clock.run(8).tokens == 8_000


def test_validation_is_no_training_time(monkeypatch) -> None:
    speed = Clock(monkeypatch).run(12, validating=(4, 8))
    assert speed.tokens == 10_000
    assert speed.seconds == pytest.approx(10 * 1.0 + 7 * 0.25)


def test_utilisation_is_needed_over_possible_flops(monkeypatch) -> None:
    speed = Clock(monkeypatch).run(12)
    assert speed.utilisation(500.0) == pytest.approx(500.0 * 10_000 / 12.25 / 1e6)
    speed.peak = None
    assert speed.utilisation(500.0) is None


def test_a_run_shorter_than_its_warm_up_has_no_speed(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    speed = clock.run(2)
    assert (speed.tokens_per_second, speed.utilisation(1.0), speed.data_wait_share) == (None, None, 0.0)
    assert clock.logged == []
    assert speed.warnings(clock.trainer) == []


def test_warnings_fire_beyond_their_limits_and_not_at_them(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    speed = clock.run(12)
    speed.wait = 0.10 * speed.seconds
    clock.loader.build_seconds, clock.loader.samples = 1.0, 1000
    assert speed.warnings(clock.trainer) == []
    speed.wait *= 1.01
    clock.loader.build_seconds *= 1.01
    waiting, building = speed.warnings(clock.trainer)
    assert "10% of the training time" in waiting
    assert "1.01 ms" in building


def test_a_slow_dataset_fires_both_warnings(shards, monkeypatch) -> None:
    batch = PackedRows.batch

    def slow(self: PackedRows, rows: Any) -> Any:
        time.sleep(0.03)
        return batch(self, rows)

    monkeypatch.setattr(PackedRows, "batch", slow)
    monkeypatch.setattr("lmforge.data.windows.MOST", 1)
    run = fit(shards, "callbacks.throughput.warmup_steps=1")
    waiting, building = run.summary["warnings"]
    assert "waiting for data" in waiting
    assert "building a sample takes" in building
    assert run.summary["data_wait_share"] > 0.10
    assert metrics(run.folder, "speed/data_wait_share")[-1][1] == pytest.approx(run.summary["data_wait_share"], abs=0.2)


@pytest.fixture
def measured(monkeypatch) -> list[torch.dtype]:
    calls: list[torch.dtype] = []
    monkeypatch.setattr(peak, "_measure", lambda dtype, threads: calls.append(dtype) or 1e9)
    return calls


def test_a_cpus_peak_is_measured_once_for_each_dtype_and_number_of_threads(tmp_path, measured) -> None:
    for _ in range(2):
        assert matmul_peak(CPU, torch.float32, 1, tmp_path) == 1e9
        matmul_peak(CPU, torch.bfloat16, 1, tmp_path)
        matmul_peak(CPU, torch.float32, 2, tmp_path)
    assert measured == [torch.float32, torch.bfloat16, torch.float32]
    assert [path.name for path in tmp_path.iterdir()] == ["matmul_peak.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00", '{"x": "fast", "y": null, "z": NaN}'])
def test_a_damaged_cache_is_measured_anew_and_repaired(tmp_path, measured, text) -> None:
    (tmp_path / "matmul_peak.json").write_text(text)
    assert matmul_peak(CPU, torch.float32, 1, tmp_path) == 1e9
    assert matmul_peak(CPU, torch.float32, 1, tmp_path) == 1e9
    assert len(measured) == 1
    assert list(json.loads((tmp_path / "matmul_peak.json").read_text()).values()) == [1e9]


def test_an_unreadable_value_for_this_very_machine_is_measured_anew(tmp_path, measured) -> None:
    matmul_peak(CPU, torch.float32, 1, tmp_path)
    file = tmp_path / "matmul_peak.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), "much")))
    assert matmul_peak(CPU, torch.float32, 1, tmp_path) == 1e9
    assert len(measured) == 2


def test_a_real_measurement_is_plausible() -> None:
    assert 1e8 < peak._measure(torch.float32, 1, size=128, rounds=2) < 1e14


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, None),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40", torch.bfloat16, None),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
        ("NVIDIA T400 4GB", torch.float16, None),
        ("Tesla T4", torch.float16, 65e12),
        ("Tesla V100-SXM2-16GB", torch.float16, 125e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H100 NVL", torch.bfloat16, 835e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("NVIDIA A10G", torch.bfloat16, 70e12),
        ("Some New Card", torch.bfloat16, None),
    ],
)
def test_a_gpus_peak_is_its_datasheets(tmp_path, monkeypatch, name, dtype, expected) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert matmul_peak(torch.device("cuda"), dtype, 1, tmp_path) == expected


def test_flops_of_the_network_enter_the_summary(shards) -> None:
    run = fit(shards)
    speed = next(c for c in run.trainer.callbacks if isinstance(c, Throughput))
    assert run.summary["mfu"] == speed.utilisation(run.task.network.flops_per_token(32))
