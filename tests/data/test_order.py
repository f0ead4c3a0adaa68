"""The order of samples: every epoch a permutation of its own, and a pure function of the sample's number."""

import numpy as np
import pytest

from lmforge.data.order import SampleOrder, permute


def epochs(size: int, seed: int, count: int = 1) -> np.ndarray:
    return SampleOrder(size, seed)(np.arange(size * count)).reshape(count, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4097])
def test_every_epoch_holds_each_row_once(size) -> None:
    assert (np.sort(epochs(size, seed=3, count=4), axis=1) == np.arange(size)).all()


def test_the_walk_along_the_cycle_is_what_keeps_it_a_permutation() -> None:
    """Mutation: folding values outside the range back with a modulo repeats rows."""
    key = np.zeros(1, dtype=np.uint64)
    folded = permute(np.arange(64), 64, key)[:50] % 50
    assert len(np.unique(folded)) < 50
    assert len(np.unique(permute(np.arange(50), 50, key))) == 50


def test_epochs_differ_from_each_other() -> None:
    orders = epochs(100, seed=0, count=5)
    assert len({tuple(order) for order in orders}) == 5


def test_seeds_differ_and_repeat() -> None:
    assert (epochs(100, seed=7) == epochs(100, seed=7)).all()
    assert len({tuple(epochs(100, seed)[0]) for seed in (*range(20), 2**32 - 1)}) == 21


def test_any_numbers_in_any_grouping_give_the_same_rows() -> None:
    order = SampleOrder(37, seed=5)
    whole = order(np.arange(200))
    picked = np.random.default_rng(0).permutation(200)
    assert (order(picked) == whole[picked]).all()
    assert (order(np.arange(200).reshape(20, 10)) == whole.reshape(20, 10)).all()
    assert [int(order(np.array([number]))[0]) for number in picked[:20]] == whole[picked[:20]].tolist()
    assert order(np.arange(0)).shape == (0,)


def test_seeking_far_ahead_costs_nothing_and_stays_in_range() -> None:
    rows = SampleOrder(1_000_003, seed=1)(np.arange(10**15, 10**15 + 1000))
    assert rows.min() >= 0
    assert rows.max() < 1_000_003
    assert len(np.unique(rows)) == 1000


def test_unshuffled_counts_up_again_in_every_epoch() -> None:
    assert SampleOrder(3, seed=9, shuffle=False)(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def chi_square(counts: np.ndarray) -> float:
    """Per degree of freedom: about 1 for uniform counts."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


@pytest.mark.parametrize("size", [6, 13, 64])
def test_each_row_comes_equally_often_at_each_place(size) -> None:
    orders = epochs(size, seed=2, count=200 * size)
    counts = np.zeros((size, size))
    np.add.at(counts, (np.arange(size), orders), 1)
    assert 0.8 < chi_square(counts) < 1.2
    shifted = np.zeros((size, size))  # mutation: an order that only rotates by epochs of one kind
    np.add.at(shifted, (np.arange(size), (orders[:1] + np.arange(size // 2)[:, None]) % size), 1)
    assert chi_square(shifted) < 0.8 or chi_square(shifted) > 1.2


def test_neighbours_and_parities_show_no_pattern() -> None:
    order = epochs(10_000, seed=4)[0]
    steps = np.diff(order)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs((order % 2)[:5000].mean() - 0.5) < 0.03
    assert (steps == 1).sum() < 10
