import pytest

from lmforge.config.keys import KEYS, find_key
from lmforge.config.schema import Key, allowed, coerce


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("optimizer.lr", "1e-4", 0.0001),
        ("optimizer.lr", "1e4", 10000.0),
        ("optimizer.lr", 1, 1.0),
        ("trainer.max_steps", 1e3, 1000),
        ("trainer.max_steps", "20", 20),
        ("seed", 0, 0),
        ("trainer.devices", [0, 1], [0, 1]),
        ("trainer.devices", "auto", "auto"),
        ("optimizer.betas", ["0.9", 0.95], [0.9, 0.95]),
        ("schedule.warmup", 10, 10),
        ("schedule.warmup", 0.1, 0.1),
        ("trainer.max_epochs", None, None),
        ("name", 7, "7"),
    ],
)
def test_values_take_the_declared_type(key, given, kept):
    value = coerce(find_key(key), given)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("optimizer.lr", "fast"),
        ("optimizer.lr", 0),
        ("optimizer.lr", -0.1),
        ("optimizer.lr", float("nan")),
        ("optimizer.lr", float("inf")),
        ("optimizer.lr", True),
        ("optimizer.lr", [0.1]),
        ("optimizer.lr", {"a": 1}),
        ("optimizer.betas", [0.9]),
        ("optimizer.betas", 0.9),
        ("optimizer.betas", [0.9, 1.0]),
        ("trainer.max_steps", 1.5),
        ("trainer.max_steps", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", None),
        ("model.bias", 1),
        ("model.bias", "true"),
        ("model.norm", "batch"),
        ("trainer.devices", ["auto"]),
        ("trainer.devices", []),
        ("name", "a=b"),
        ("name", "../up"),
        ("name", ""),
        ("callbacks.samples", "text"),
    ],
)
def test_values_that_do_not_fit(key, given):
    with pytest.raises(ValueError):  # noqa: PT011
        coerce(find_key(key), given)


def test_pattern_must_match_depth():
    assert find_key("callbacks.anything.monitor") is KEYS["callbacks.*.monitor"]
    assert find_key("callbacks.deeper.anything.monitor") is None
    assert find_key("model.n_layers") is None


def test_allowed_says_limits_words_and_null():
    assert (
        allowed(Key("int", low=1, words=("auto",), nullable=True)) == "a whole number of at least 1, or auto, or null"
    )
    assert allowed(Key("float", above=0, high=1)) == "a number above 0 and of at most 1"
    assert allowed(Key("text", words=("a", "b"))) == "one of a, b"
    assert allowed(find_key("seed")).endswith("4294967295")
