"""The judgement: a slope through segments of different levels, growth of handles, limits."""

import random

import pytest

from lmforge.soak.training import Sample
from lmforge.soak.verdicts import Slope, at_most, handle_growth, memory_slope, of_memory, passed


def segment(level: float, per_hour: float, seconds: int = 400, noise: float = 0.0) -> list[Sample]:
    draws = random.Random(level)
    return [Sample(s, level + per_hour * s / 3600 + draws.uniform(-noise, noise), 20) for s in range(seconds)]


@pytest.mark.parametrize("per_hour", [0.0, 36.0, -12.0])
def test_one_slope_through_segments_of_any_level(per_hour) -> None:
    segments = [segment(300, per_hour), segment(380, per_hour), segment(310, per_hour, 200)]
    slope = memory_slope(segments)
    assert slope.per_hour == pytest.approx(per_hour, abs=1e-6)
    assert slope.seconds == 369 * 2 + 169


def test_noise_hardly_moves_it() -> None:
    slope = memory_slope([segment(300 + n, 60.0, 1200, noise=1.0) for n in range(3)])
    assert slope.per_hour == pytest.approx(60.0, abs=3.0)


def test_what_is_taken_in_the_first_seconds_is_no_leak() -> None:
    warming = [Sample(s, 100.0 * min(s, 20), 20) for s in range(400)]
    assert memory_slope([warming]).per_hour == 0.0


def test_nothing_measured_is_nothing() -> None:
    assert memory_slope([[], segment(1, 1, 5)]) == Slope(0.0, 0.0)


def test_too_short_a_time_is_not_judged() -> None:
    assert of_memory(Slope(1000.0, 599.0), 20.0).passed is None
    assert of_memory(Slope(20.1, 600.0), 20.0).passed is False
    assert of_memory(Slope(20.0, 600.0), 20.0).passed is True


def test_handles_that_pile_up() -> None:
    def handles(*counts: int) -> list[Sample]:
        return [Sample(40.0 * place, 1.0, count) for place, count in enumerate(counts)]

    assert handle_growth([handles(9, 20, 21, 20, 20, 21, 20)]) <= 0  # the first look is too early
    assert handle_growth([handles(20, 20, 20, 20, 20, 20, 21, 25), []]) == 5


def test_limits_hold_as_stated() -> None:
    assert at_most("x", 8, 8).passed
    assert not at_most("x", 8.01, 8).passed
    assert passed([at_most("x", 1, 2), of_memory(Slope(9.0, 1.0), 0.0)])
    assert not passed([at_most("x", 1, 2), at_most("y", 3, 2)])
