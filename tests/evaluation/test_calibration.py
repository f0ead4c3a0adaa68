"""The expected calibration error: a case done by hand, borders of bins, and sums that do not care how they are cut."""

import pytest
import torch

from lmforge.evaluation.calibration import Reliability
from lmforge.tasks.metrics import TokenScores

# confidence, right?, counts?
BY_HAND = [(0.05, False, True), (0.10, True, True), (0.95, True, True), (0.91, False, True), (0.99, True, False)]


def scores(rows: list[tuple[float, bool, bool]]) -> TokenScores:
    sure, right, counts = zip(*rows, strict=True)
    correct, counted = torch.tensor(right), torch.tensor(counts)
    confidence = torch.tensor(sure, dtype=torch.float64)
    return TokenScores(torch.zeros(len(rows)), counted, correct & counted, counted.long(), confidence)


def measured(rows: list[tuple[float, bool, bool]], bins: int, batch: int = 100) -> dict:
    metric = Reliability(bins)
    for start in range(0, len(rows), batch):
        metric.update(scores(rows[start : start + batch]))
    return metric.compute()


def test_a_case_done_by_hand() -> None:
    """Ten bins: (0, 0.1] holds 0.05 wrong and 0.10 right, (0.9, 1] holds 0.95 right and 0.91 wrong; the fifth token is
    no target. Gaps: |1/2 - 0.075| and |1/2 - 0.93|, each with half of the targets."""
    result = measured(BY_HAND, bins=10)
    assert result["ece"] == pytest.approx(0.5 * 0.425 + 0.5 * 0.43, abs=1e-12)
    assert result["confidence"] == pytest.approx((0.05 + 0.10 + 0.95 + 0.91) / 4)
    assert result["accuracy"] == 0.5
    low, high = result["bins"]
    assert (low["above"], low["to"], low["targets"], low["accuracy"]) == (0.0, 0.1, 2, 0.5)
    assert (high["above"], high["to"], high["targets"], high["accuracy"]) == (0.9, 1.0, 2, 0.5)
    assert [low["confidence"], high["confidence"]] == pytest.approx([0.075, 0.93])


def test_one_bin_is_the_gap_between_the_means_and_hides_the_rest() -> None:
    assert measured(BY_HAND, bins=1)["ece"] == pytest.approx(abs(0.5 - 0.5025))


def test_a_confidence_on_a_border_belongs_to_the_bin_below() -> None:
    entries = measured([(0.25, True, True), (0.5, True, True), (1.0, True, True), (0.0, False, True)], bins=4)["bins"]
    assert [(entry["above"], entry["targets"]) for entry in entries] == [(0.0, 2), (0.25, 1), (0.75, 1)]


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_batches_change_nothing_but_their_mean_would(batch) -> None:
    drawn = torch.rand(50, 2, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [(confidence, luck < confidence**2, True) for confidence, luck in drawn]
    whole = measured(rows, bins=15)
    cut = measured(rows, bins=15, batch=batch)
    assert cut["ece"] == pytest.approx(whole["ece"], abs=1e-12)
    assert [e["targets"] for e in cut["bins"]] == [e["targets"] for e in whole["bins"]]
    parts = [measured(rows[start : start + batch], bins=15)["ece"] for start in range(0, 50, batch)]
    assert abs(sum(parts) / len(parts) - whole["ece"]) > 0.05


def test_without_targets_there_is_nothing_to_say() -> None:
    assert measured([(0.5, False, False)], bins=15) == {}
