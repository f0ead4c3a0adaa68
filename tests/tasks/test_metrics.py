"""Metrics weigh by tokens, exactly."""

import math

import pytest
import torch

from lmforge.tasks.metrics import Counts, TokenMetrics


def counts(loss: float, targets: int, correct: int = 0, size: int = 0) -> Counts:
    return Counts(torch.tensor(loss), *(torch.tensor(number) for number in (targets, correct, size)))


def measured(*batches: Counts) -> dict[str, float]:
    metrics = TokenMetrics()
    for batch in batches:
        metrics.update(batch)
    return metrics.compute()


def test_values_by_hand() -> None:
    values = measured(counts(12.0, targets=8, correct=6, size=20))
    assert values == {
        "loss": 1.5,
        "perplexity": pytest.approx(math.exp(1.5)),
        "accuracy": 0.75,
        "bits_per_byte": pytest.approx(12.0 / math.log(2) / 20),
    }


def test_two_batches_with_means_1_and_3_have_loss_2_and_perplexity_e_squared() -> None:
    values = measured(counts(10.0, 10), counts(30.0, 10))
    assert values["loss"] == 2.0
    assert values["perplexity"] == pytest.approx(7.389, abs=1e-3)


def test_batches_of_different_size_weigh_by_their_tokens() -> None:
    values = measured(counts(6.0, 3, correct=3), counts(10.0, 1, correct=0))
    assert values["loss"] == 4.0  # not (2 + 10) / 2
    assert values["accuracy"] == 0.75  # not (1 + 0) / 2


def test_without_targets_there_is_no_value() -> None:
    assert measured() == {}
    assert measured(counts(0.0, 0)) == {}


def test_without_bytes_there_are_no_bits_per_byte() -> None:
    assert "bits_per_byte" not in measured(counts(1.0, 1))


def test_sums_are_exact_far_beyond_float32() -> None:
    values = measured(counts(2.0**24, 2**40, correct=2**40), counts(1.0, 1))
    assert values["loss"] == (2**24 + 1) / (2**40 + 1)
    assert values["accuracy"] == 2**40 / (2**40 + 1) != 1.0


def test_not_a_number_is_reported_as_such_and_infinity_as_a_finite_perplexity() -> None:
    assert math.isnan(measured(counts(math.nan, 1))["loss"])
    assert math.isfinite(measured(counts(math.inf, 1))["perplexity"])
