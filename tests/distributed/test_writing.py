"""A network that is spread over ranks writes what it writes in one process, on every rank the same."""

from typing import Any

import pytest
import torch

from builders import SHAPE, tiny_gpt
from lmforge.config.layout import Layout
from lmforge.models.gpt import GPT
from lmforge.parallel.plan import Plan
from lmforge.parallel.precision import ForwardPrecision
from lmforge.tasks.generation import Sampling, generate_ids
from ranks import run_ranks

PROMPT = [5, 9, 2, 40, 7]  # of a length that two ranks cannot share evenly


def write(network: GPT, forward: Any = None) -> list[int]:
    return list(generate_ids(network, PROMPT, 20, Sampling(0.7), 3, end=None, vocabulary=64, forward=forward))


def write_on_ranks(layout: Layout, options: dict[str, Any]) -> list[int]:
    torch.distributed.init_process_group("gloo")
    weights = tiny_gpt(scale=5.0, **options).state_dict()
    with torch.device("meta"):
        network = GPT(**{**SHAPE, **options})
    network.initial_value = lambda name, shape, generator: weights[name]  # type: ignore[method-assign]
    precision = ForwardPrecision("32-true", "float32", "float32", "float32", False, "cpu")
    parallel = Plan("mesh", layout).apply(network, precision, torch.device("cpu"), seed=0)
    return write(network.eval(), parallel.infer)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(tp=2), {}),
        (Layout(pp=2), {"positions": "learned"}),
        (Layout(cp=2), {"tied": False}),
        (Layout(tp=2, pp=2), {"tied": False}),
    ],
    ids=str,
)
def test_ranks_write_what_one_process_writes(layout, options) -> None:
    expected = write(tiny_gpt(scale=5.0, **options))
    assert len(set(expected)) > 5
    assert run_ranks(write_on_ranks, layout.world, layout, options) == [expected] * layout.world
