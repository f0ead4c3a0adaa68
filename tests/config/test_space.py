"""Search spaces as they are typed."""

import pytest

from lmforge.config.parse import read_words
from lmforge.config.space import Space


@pytest.mark.parametrize(
    ("token", "values", "space"),
    [
        ("optimizer.lr=interval(1e-4, 1e-2)", (1e-4, 1e-2), Space(1e-4, 1e-2)),
        ("optimizer.lr=interval(1, 2)", (1.0, 2.0), Space(1.0, 2.0)),
        ("optimizer.lr=tag(log, interval(1e-4, 1e4))", (1e-4, 1e4), Space(1e-4, 1e4, log=True)),
        ("model.n_layer=interval(2, 8)", (2, 8), Space(2, 8, whole=True)),
        ("model.n_layer=tag(log, interval(2, 8))", (2, 8), Space(2, 8, log=True, whole=True)),
        ("model.d_ff=range(128,513,64)", tuple(range(128, 513, 64)), Space(128, 512, 64.0, whole=True)),
        ("model.d_ff=range(1,5)", (1, 2, 3, 4), Space(1, 4, 1.0, whole=True)),
        ("optimizer.weight_decay=range(0,1,0.25)", (0.0, 0.25, 0.5, 0.75), Space(0.0, 0.75, 0.25)),
        ("schedule.warmup=interval(10, 20)", (10, 20), Space(10, 20, whole=True)),
        ("schedule.warmup=interval(0, 1)", (0.0, 1.0), Space(0.0, 1.0)),
        ("schedule.warmup=interval(0.1, 0.2)", (0.1, 0.2), Space(0.1, 0.2)),
        ("model.n_layer=choice(2,4)", (2, 4), None),
        ("model.norm=choice(rms,layer)", ("rms", "layer"), None),
        ("optimizer=choice(muon,adamw)", ("muon", "adamw"), None),
        ("trainer.devices=choice(1,2)", (1, 2), None),
    ],
)
def test_spaces(tree, token, values, space):
    problems: list[str] = []
    (word,) = read_words([token], tree, True, problems)
    assert (word.values, word.space, problems) == (values, space, [])
    assert [type(value) for value in word.values] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("optimizer.lr=interval(2, 1)", "the first number must be the smaller one"),
        ("optimizer.lr=tag(log, interval(0, 1))", "needs numbers above 0"),
        ("optimizer.lr=tag(log, choice(1, 2))", "goes with interval"),
        ("optimizer.lr=tag(log, range(1, 9, 2))", "which has no step"),
        ("optimizer.lr=tag(lin, interval(1, 2))", "tag lin unknown"),
        ("model.n_layer=interval(1.5, 3)", "whole numbers"),
        ("optimizer.lr=interval(1e-4)", "cannot be read"),
    ],
)
def test_spaces_that_are_none(tree, token, said):
    problems: list[str] = []
    assert read_words([token], tree, True, problems) == []
    assert said in problems[0]


@pytest.mark.parametrize("token", ["optimizer.lr=interval(1e-4, 1e-2)", "model.d_ff=range(128,513,64)"])
def test_a_space_is_no_value(tree, token):
    problems: list[str] = []
    assert read_words([token], tree, False, problems) == []
    assert "add sweep=optuna" in problems[0]
