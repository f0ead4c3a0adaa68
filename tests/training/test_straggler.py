"""What counts as a rank's own time, the excess over the others, and when it is worth a word."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmforge.tasks.update import UpdateTask
from lmforge.training import straggler
from lmforge.training.straggler import Straggler, slowest


@pytest.mark.parametrize(
    ("seconds", "rank", "excess"),
    [
        ([1.0, 1.5], 1, 0.5),
        ([1.0, 1.0, 3.0, 1.2], 2, 2.0),  # of the others the median is 1
        ([2.0, 1.0, 1.0, 2.0, 1.0], 0, 1.0),
        ([0.0, 0.0], 0, 0.0),
    ],
)
def test_the_slowest_and_the_median_of_the_others(seconds, rank, excess) -> None:
    assert slowest(seconds) == (rank, pytest.approx(excess))


class Ranks:
    """Rank 0 of three by a fake clock; the other two take `others` seconds a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: tuple[float, float] = (1.0, 1.0)):
        self.now, self.others, self.steps = 0.0, others, 0
        self.logged: list[dict[str, float]] = []
        self.said: list[str] = []
        self.straggler: Any = Straggler(every_n_steps=4, warn_above=0.2)
        self.task = UpdateTask.__new__(UpdateTask)
        self.control = SimpleNamespace(waited=0.0, world=3, gather=self.gather)
        parameter = torch.nn.Parameter(torch.zeros(1))
        network = torch.nn.ParameterList([parameter])
        self.task.__dict__ |= {"control": self.control, "before_update": [], "network": network, "_modules": {}}
        self.trainer: Any = SimpleNamespace(global_step=0, strategy=SimpleNamespace(root_device=torch.device("cpu")))
        monkeypatch.setattr(straggler.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(straggler, "log", lambda trainer, values, step: self.logged.append(values))
        monkeypatch.setattr(straggler, "warn", self.said.append)
        self.straggler.on_fit_start(self.trainer, self.task)

    def gather(self, number: int) -> list[int]:
        return [number, *(round(1e6 * each * self.steps) for each in self.others)]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.control.waited += seconds

    def run(self, steps: int, own: float, validating: bool = False) -> None:
        """Steps of `own` seconds, a third of them before the agreement, and of much waiting."""
        for _ in range(steps):
            self.now += own / 3
            self.straggler.on_train_batch_start()
            self.wait(5.0)  # the agreement
            self.now += own * 2 / 3
            self.straggler._note_gradient(torch.zeros(1))
            self.now += 7.0  # the reduction
            self.straggler._note_update()
            self.trainer.global_step += 1
            self.steps = len(self.straggler.spans)
            self.straggler.on_train_batch_end(self.trainer, self.task)
            if validating:
                self.straggler.on_validation_start()
                self.now += 100.0


def excesses(ranks: Ranks) -> list[float]:
    return [values["speed/straggler_excess"] for values in ranks.logged]


def test_waiting_and_validations_are_not_ones_own_time(monkeypatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.run(8, own=1.5)
    assert excesses(ranks) == pytest.approx([0.5, 0.5])
    assert [values["speed/straggler_rank"] for values in ranks.logged] == [0.0, 0.0]
    ranks.run(1, own=1.5, validating=True)
    ranks.run(3, own=1.5)
    assert excesses(ranks)[2] == pytest.approx(0.5)


def test_only_what_lasts_is_said_and_once(monkeypatch) -> None:
    ranks = Ranks(monkeypatch)
    for own in (1.5, 1.5, 1.1, 1.5, 1.5):
        ranks.run(4, own)
    assert ranks.said == []
    ranks.run(8, own=1.5)
    assert ranks.said == ["rank 0 computes 50% longer than the others, which wait for it"]
    assert ranks.straggler.warning.startswith("rank 0 computed 50% longer than the others in 6 of 7 intervals")
    ranks.run(4 * 6, own=1.0)
    assert ranks.straggler.warning is None  # no longer most of the run
    assert len(ranks.said) == 1


def test_nothing_when_all_are_alike(monkeypatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.run(40, own=1.15)
    assert ranks.said == []
    assert ranks.straggler.warning is None


def test_the_summary_warns(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, others=(1.0, 2.0))
    ranks.run(16, own=1.0)
    assert ranks.straggler.warning.startswith("rank 2 computed 100% longer than the others in 4 of 4 intervals")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no stream that runs behind its host")
def test_a_gpus_own_time_is_that_of_its_stream() -> None:
    watched: Any = Straggler(every_n_steps=1, warn_above=0.2)
    watched.device = torch.device("cuda")
    start = watched._stamp()
    torch.cuda._sleep(50_000_000)
    end = watched._stamp()
    assert 0.005 < straggler._seconds(start, end) < 1.0
