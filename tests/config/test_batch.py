"""The batch arithmetic: sequences = micro x dp x accumulation, or the numbers that do not divide."""

import pytest

from lmforge.config.batch import batch_plan
from lmforge.config.checks import preflight


def problems(compose, *typed):
    return preflight(compose.plain(*typed))[0]


@pytest.mark.parametrize(("devices", "nodes", "factor"), [(1, 1, 8), (2, 1, 4), (2, 2, 2)])
def test_accumulation_counts_devices_and_nodes(compose, devices, nodes, factor):
    words = [
        "batch.sequences=16",
        "batch.micro_sequences=2",
        f"trainer.devices={devices}",
        f"trainer.num_nodes={nodes}",
    ]
    plan = batch_plan(compose.plain(*words))
    assert (plan.sequences, plan.micro, plan.accumulation, plan.world) == (16, 2, factor, devices * nodes)
    assert plan.micro * plan.world * plan.accumulation == plan.sequences


def test_batch_plan_reads_as_arithmetic(compose):
    plan = batch_plan(compose.plain("batch.sequences=16", "batch.micro_sequences=2", "trainer.devices=2"))
    assert str(plan) == "global batch 16 = 2 x 2 devices x 1 node x accumulation 4"


def test_batch_that_does_not_divide_shows_the_numbers(compose):
    (problem,) = problems(compose, "batch.sequences=15", "batch.micro_sequences=2")
    assert problem.startswith("global batch 15 = 2 x 1 device x 1 node x accumulation 7.5: does not divide")
    assert "14 or 16" in problem


def test_tokens_that_do_not_divide(compose):
    (problem,) = problems(compose, "batch.tokens=1000")
    assert problem == "batch.tokens=1000: 1000 / data.context 256 = 3.906 sequences; use 768 or 1024"


@pytest.mark.parametrize(("sequences", "context", "micro"), [(4, 256, 4), (64, 256, 8), (10, 256, 5), (7, 8192, 1)])
def test_auto_micro_is_the_largest_divisor_within_2048_tokens_on_a_cpu(compose, sequences, context, micro):
    plan = batch_plan(compose.plain(f"batch.sequences={sequences}", f"model.context={context}"))
    assert plan.micro == micro


@pytest.mark.parametrize("words", [["batch.tokens=null"], ["batch.tokens=512", "batch.sequences=2"]])
def test_exactly_one_batch_word(compose, words):
    assert "give exactly one" in problems(compose, *words)[0]
