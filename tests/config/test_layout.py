"""Layouts: where each rank stands, what divides and what is refused with both numbers."""

from itertools import product
from pathlib import Path

import pytest

from lmforge.config.batch import batch_plan, layout_of, strategy_kind
from lmforge.config.checks import preflight
from lmforge.config.errors import UsageError
from lmforge.config.layout import Layout, Place, read_layout

WORDS = sorted(file.stem for file in (Path(__file__).parents[2] / "configs" / "strategy").glob("[!_]*.yaml"))
MESH = {"kind": "mesh", "dp": "auto", "shard": "all", "tp": 1, "pp": 1, "cp": 1}


def test_places_count_through_the_grid_with_tp_fastest() -> None:
    layout = Layout(dp=2, tp=2, pp=2, cp=2)
    places = [layout.place(rank) for rank in range(16)]
    assert places == [Place(pp, dp, cp, tp) for pp, dp, cp, tp in product(range(2), repeat=4)]
    assert Layout(dp=3, pp=2).place(4) == Place(1, 1, 0, 0)


@pytest.mark.parametrize(
    ("keys", "devices", "nodes", "expected"),
    [
        ({}, 4, 2, Layout(dp=8, shard=8)),
        ({"shard": "node"}, 4, 2, Layout(dp=8, shard=4)),
        ({"shard": "node", "tp": 2}, 4, 2, Layout(dp=4, shard=2, tp=2)),
        ({"shard": "node", "tp": 4}, 4, 2, Layout(dp=2, shard=1, tp=4)),
        ({"shard": 2, "cp": 2}, 8, 1, Layout(dp=4, shard=2, cp=2)),
        ({"tp": 2, "pp": 2}, 8, 1, Layout(dp=2, shard=2, tp=2, pp=2)),
        ({"dp": 1, "tp": 2}, 2, 1, Layout(dp=1, shard=1, tp=2)),
        ({"tp": 2, "pp": 2}, 1, 1, Layout()),
    ],
)
def test_a_layout_from_its_keys(keys, devices, nodes, expected) -> None:
    assert read_layout(MESH | keys, devices, nodes) == expected


@pytest.mark.parametrize(
    ("keys", "devices", "said"),
    [
        ({"tp": 2, "pp": 2}, 6, "strategy.tp 2 x strategy.pp 2 = 4 does not divide the 6 processes"),
        ({"dp": 2, "tp": 2}, 8, "strategy.dp 2 x strategy.tp 2 = 4 is not the 8 processes"),
        ({"cp": 3}, 4, "strategy.cp=3 does not divide the 4 processes (4 devices); trainer.devices=3 would fit"),
        ({"shard": 3}, 4, "3 does not divide the 4 data-parallel ranks; near: 1, 2, 4"),
    ],
)
def test_what_does_not_fit_names_the_numbers(keys, devices, said) -> None:
    with pytest.raises(UsageError) as error:
        read_layout(MESH | keys, devices, 1)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strategy=tensor model.n_head=3 model.n_kv_head=3 model.d_model=48", "n_head=3: must divide by strategy"),
        ("strategy=tensor model.n_kv_head=1", "model.n_kv_head=1: must divide by strategy.tp = 2; near: 2"),
        ("strategy=tensor model.vocab_size=4099", "model.vocab_size=4099: must divide by strategy.tp = 2"),
        ("strategy=pipeline model.n_layer=3", "model.n_layer=3: must divide by strategy.pp = 2; near: 2 or 4"),
        ("strategy=pipeline strategy.virtual_stages=2 model.n_layer=6", "virtual_stages = 4; near: 4 or 8"),
        ("strategy=context model.context=18", "data.context=18: must divide by strategy.cp x 2 x strategy.tp = 4"),
        ("strategy=pipeline batch.micro_sequences=16", "a pipeline needs at least 2 micro-batches"),
        ("strategy=fsdp strategy.virtual_stages=2", "strategy.virtual_stages=2: needs strategy.pp of at least 2"),
        ("strategy=tensor precision=16-mixed", "precision=16-mixed: not with strategy.tp"),
    ],
)  # fmt: skip
def test_a_network_or_batch_that_cannot_be_cut_so(compose, words, said) -> None:
    shape = ["batch.tokens=null", "batch.sequences=16", "trainer.devices=2"]
    problems, _ = preflight(compose.plain(*shape, *words.split()), machine_too=False)
    assert any(said in problem for problem in problems), problems


def test_a_size_that_was_refused_is_not_computed_with(compose) -> None:
    plain = compose.plain("strategy=fsdp", "trainer.devices=2")
    plain["strategy"]["tp"] = 0
    assert preflight(plain, broken=["strategy.tp"], machine_too=False)[0] == []


def test_local_sizes_are_told_when_tensor_cores_cannot_use_them(compose) -> None:
    plain = compose.plain("strategy=tensor", "strategy.tp=2", "trainer.devices=2", "model.d_ff=72")
    _, notes = preflight(plain, machine_too=False)
    assert "slower on GPUs: d_ff 72 / tp 2 = 36, not a multiple of 8" in notes


@pytest.mark.parametrize("word", [word for word in WORDS if word not in ("auto", "single")])
def test_every_strategy_trains_alone_and_says_so(compose, word) -> None:
    plain = compose.plain(f"strategy={word}", "trainer.devices=1")
    problems, notes = preflight(plain, machine_too=False)
    assert not problems
    assert strategy_kind(plain) == "single"
    assert layout_of(plain).world == 1
    assert any("one process" in note for note in notes)


def test_a_pipeline_gets_a_micro_batch_for_each_stage(compose) -> None:
    words = ("batch.tokens=null", "batch.sequences=8", "strategy=3d", "trainer.devices=8")
    plan = batch_plan(compose.plain(*words))
    assert (plan.dp, plan.micro, plan.accumulation) == (2, 2, 2)
    assert str(plan) == "global batch 8 = 2 x dp 2 x accumulation 2"
