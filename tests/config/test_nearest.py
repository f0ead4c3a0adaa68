import pytest

from lmforge.config.nearest import edit_distance, nearest, nearest_key

STRATEGIES = ("auto", "ddp", "fsdp", "single")
KEYS = ("optimizer.lr", "model.n_layer", "trainer.max_steps", "trainer.max_epochs", "seed")


@pytest.mark.parametrize(
    ("a", "b", "distance"), [("fspd", "fsdp", 1), ("ab", "ba", 1), ("abc", "abd", 1), ("", "ab", 2)]
)
def test_neighbours_swapped_count_as_one_edit(a, b, distance):
    assert edit_distance(a, b) == distance


@pytest.mark.parametrize(("typed", "meant"), [("fspd", "fsdp"), ("FSDP", "fsdp"), ("dpp", "ddp"), ("sinlge", "single")])
def test_misspelt_choice(typed, meant):
    assert nearest(typed, STRATEGIES) == meant


def test_nothing_near():
    assert nearest("zzzzzz", STRATEGIES) is None
    assert nearest("x", []) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "optimizer.lr"),
        ("model.lr", "optimizer.lr"),
        ("optimzer.lr", "optimizer.lr"),
        ("trainer.max_stesp", "trainer.max_steps"),
        ("max_epochs", "trainer.max_epochs"),
        ("sede", "seed"),
    ],
)
def test_misspelt_key(typed, meant):
    assert nearest_key(typed, KEYS) == meant
