"""Schedules are pure functions of the step that stay between zero and the peak."""

import pytest

from lmforge.training.schedules import WSD, Constant, Cosine, Linear, Schedule

TOTALS = [2, 3, 4, 5, 7, 10, 33, 100, 101, 1000]
SCHEDULES = [
    shape(warmup=warmup, **options)
    for warmup in (0, 0.05, 0.3, 1, 2, 10)
    for shape, options in (
        (Constant, {}),
        (Linear, {"final": 0.0}),
        (Linear, {"final": 0.1}),
        (Cosine, {"final": 0.0}),
        (Cosine, {"final": 0.1}),
        (WSD, {"final": 0.0, "decay": 0.4}),
        (WSD, {"final": 0.05, "decay": 1.0}),
        (WSD, {"final": 0.3, "decay": 0.1}),
    )
]


def factors(schedule: Schedule, total: int) -> list[float]:
    return [schedule(step, total) for step in range(1, total + 1)]


def faults(values: list[float], final: float) -> list[str]:
    """What is wrong with a whole run's factors."""
    top = values.index(max(values))
    checks = {
        "outside [0, 1]": all(0.0 <= value <= 1.0 for value in values),
        "never at the peak": max(values) == 1.0,
        "not climbing to the peak": values[: top + 1] == sorted(set(values[: top + 1])),
        "not falling after it": values[top:] == sorted(values[top:], reverse=True),
        "another last value": abs(values[-1] - final) <= 1e-12,
    }
    return [fault for fault, good in checks.items() if not good]


@pytest.mark.parametrize("total", TOTALS)
def test_climbs_to_the_peak_and_never_rises_again(total) -> None:
    for schedule in SCHEDULES:
        warms_to_the_end = round(schedule.warmup if schedule.warmup >= 1 else 0) >= total
        final = 1.0 if warms_to_the_end else getattr(schedule, "final", 1.0)
        assert faults(factors(schedule, total), final) == [], schedule


def test_the_check_sees_micro_batches_counted_as_steps() -> None:
    """Mutation: a schedule driven eight times too far without a clamp (updates 8, 16, 24, 32 of 4)."""
    unclamped = [1.0 - 0.5 * micro / 4 for micro in (8, 16, 24, 32)]
    assert "outside [0, 1]" in faults(unclamped, 0.0)
    assert "never at the peak" in faults(unclamped, 0.0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_beyond_the_end_stays_at_the_last_value(schedule) -> None:
    assert {schedule(step, 20) for step in (20, 21, 1000, 10**9)} == {schedule(20, 20)}


def test_four_updates_with_a_warm_down_over_the_second_half() -> None:
    assert factors(WSD(warmup=0, final=0.1, decay=0.5), 5) == pytest.approx([1, 1, 1, 0.55, 0.1])
    values = factors(WSD(warmup=0, final=0.1, decay=0.5), 4)
    assert values[:2] == [1.0, 1.0]
    assert values[-1] == pytest.approx(0.1, rel=0.01)


def test_known_values() -> None:
    assert factors(Linear(warmup=2, final=0.0), 6) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert factors(Cosine(warmup=0, final=0.2), 3) == pytest.approx([1, 0.6, 0.2])
    assert factors(Constant(warmup=0.5), 4) == [0.5, 1, 1, 1]


def test_a_share_of_the_run_is_as_many_steps() -> None:
    assert factors(Cosine(warmup=0.25), 40) == factors(Cosine(warmup=10), 40)
    assert factors(Cosine(warmup=0.25), 40) != factors(Cosine(warmup=11), 40)


def test_a_run_of_one_step_is_at_the_peak() -> None:
    assert {schedule(1, 1) for schedule in SCHEDULES} == {1.0}


def test_nothing_is_remembered_between_calls() -> None:
    schedule = Cosine(warmup=0.1)
    forwards = factors(schedule, 50)
    assert [schedule(step, 50) for step in range(50, 0, -1)] == forwards[::-1]
    schedule(7, 1000)
    assert factors(schedule, 50) == forwards
