"""Typed words on top of a stored run: resume, evaluate, generate."""

import json

import pytest

from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.config.parse import read_words
from lmforge.config.prepare import continue_run, plan_from_run


def resumed(compose, run, *words):
    plan = compose.plan(f"resume={run.path}", *words)
    continue_run(plan)
    return plan


def from_run(composer, name, *typed):
    problems = []
    words = read_words(typed, composer.tree, False, problems)
    return plan_from_run(Composer(name, composer.tree), composer, words, (), Launch(), problems)


@pytest.fixture
def run(compose):
    run = compose.run("model.n_layer=2", "optimizer=adamw", "optimizer.lr=1e-3", "trainer.max_steps=10")
    (run.checkpoints / "step-00000010").mkdir()
    (run.checkpoints / "epoch=1-step=20.ckpt").mkdir()
    return run


def test_the_stored_config_is_the_base(compose, run):
    plan = resumed(compose, run)
    assert plan.plain["model"]["n_layer"] == 2
    assert plan.plain["optimizer"]["lr"] == 0.001
    assert plan.plain["resume"] == str(run.path)
    assert not plan.changed


def test_changes_that_take_effect_are_said(compose, run):
    plan = resumed(compose, run, "optimizer.lr=3e-4", "trainer.max_steps=20", "strategy=fsdp", "schedule=cosine")
    assert plan.plain["optimizer"]["lr"] == 0.0003
    assert plan.plain["strategy"] == {"kind": "fsdp", "reshard_after_forward": True}
    assert "decay" not in plan.plain["schedule"]
    assert "optimizer.lr 0.001 -> 0.0003" in plan.notes
    assert "trainer.max_steps 10 -> 20" in plan.notes


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.n_layer=3", "model.n_layer=3: the stored run has 2"),
        ("seed=1", "seed=1: the stored run has 0"),
        ("batch.sequences=8", "batch.sequences=8: the stored run has null"),
        ("precision=64-true", "precision.word=64-true: the stored run has"),
        ("optimizer=muon", "optimizer._target_=lmforge.training.optimizers.muon: the stored run has"),
        ("data.vocab_size=300", "data.vocab_size=300"),
        ("experiment=nano", "presets are for new runs"),
        ("weights=.", "resume continues a run, weights starts a new one"),
        ("optimizer.momentum=0.5", "is a key of optimizer=muon only"),
    ],
)
def test_changes_that_are_refused(compose, run, word, said):
    with pytest.raises(UsageError) as error:
        resumed(compose, run, word)
    assert said in str(error.value)


def test_repeating_a_stored_value_is_no_change(compose, run):
    assert not resumed(compose, run, "model.n_layer=2", "seed=0").changed


def test_refusals_come_together(compose, run):
    with pytest.raises(UsageError) as error:
        resumed(compose, run, "model.n_layer=3", "seed=1", "optimizer.lr=fast", "trainer.max_stesp=1")
    assert len(error.value.problems) == 4


def test_missing_run_names_a_near_one(compose, run):
    with pytest.raises(UsageError, match=f"did you mean {run.path}"):
        compose.plan(f"resume={str(run.path)[:-1]}")


def test_a_finished_run_is_left_alone(compose, run):
    run.summary_file.write_text(json.dumps({"steps": 10, "reason": "max_steps"}))
    assert "is finished" in resumed(compose, run).done
    assert resumed(compose, run, "trainer.max_steps=11").done is None


def test_auto_reports_what_it_changes(compose, run):
    plan = compose.plan(
        "resume=auto", "model.n_layer=2", "optimizer=adamw", "optimizer.lr=1e-3", "trainer.max_steps=12"
    )
    continue_run(plan)
    assert plan.run.id == run.id
    assert plan.changed == {"trainer.max_steps": (10, 12)}


def test_auto_starts_anew_when_nothing_is_alike(compose, run):
    plan = compose.plan("resume=auto", "seed=9")
    continue_run(plan)
    assert plan.run is None
    assert plan.plain["resume"] is None


def test_evaluate_takes_the_model_from_the_run(composer, run):
    plain = from_run(composer, "evaluate", "ckpt=last", "batch_sequences=4", "trainer.devices=2").plain
    assert plain["model"]["n_layer"] == 2
    assert (plain["ckpt"], plain["split"], plain["run"]) == ("last", "val", str(run.path))
    assert plain["precision"]["word"] == "32-true"
    assert plain["batch"] == {"tokens": None, "sequences": 8, "micro_sequences": 4}


def test_evaluate_is_32_true_whatever_the_training_was(compose, composer):
    trained = compose.run("precision=bf16-mixed")
    (trained.checkpoints / "step-00000001").mkdir()
    assert from_run(composer, "evaluate").plain["precision"]["compute"] == "float32"
    assert from_run(composer, "evaluate", "precision=bf16-mixed").plain["precision"]["compute"] == "bfloat16"


def test_evaluate_lists_model_keys_that_differ(composer, run):
    assert from_run(composer, "evaluate", "model.n_layer=2")
    with pytest.raises(UsageError) as error:
        from_run(composer, "evaluate", "model.n_layer=4", "model.bias=true")
    assert "model.n_layer=4 (the run has 2), model.bias=true (the run has false)" in str(error.value)


def test_evaluate_on_other_text(composer, run, tmp_path):
    (tmp_path / "a=b.txt").write_text("text")
    data = from_run(composer, "evaluate", "data=text", "data.path=a=b.txt").plain["data"]
    assert data["_target_"].endswith("TextData")
    assert (data["path"], data["context"]) == ("a=b.txt", 256)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "typed", ["ckpt=epoch=1-step=20.ckpt", "ckpt=epoch\\=1-step\\=20.ckpt", 'ckpt="epoch=1-step=20.ckpt"']
)
def test_awkward_checkpoint_names(composer, run, typed):
    assert from_run(composer, "evaluate", typed).plain["ckpt"] == str(run.checkpoints / "epoch=1-step=20.ckpt")


@pytest.mark.parametrize(("ckpt", "said"), [("bets", "did you mean best?"), ("step-00000011", "mean step-00000010?")])
def test_missing_checkpoint(composer, run, ckpt, said):
    with pytest.raises(UsageError) as error:
        from_run(composer, "evaluate", f"ckpt={ckpt}", f"run={run.path}")
    assert said in str(error.value)


def test_run_without_a_checkpoint(compose, composer):
    compose.run()
    with pytest.raises(UsageError, match="holds no checkpoint yet"):
        from_run(composer, "evaluate")


def test_generate_has_its_own_keys(composer, run):
    plain = from_run(composer, "generate", "prompt=def f(a, b): ${x}", "temperature=0", "seed=5").plain
    assert (plain["prompt"], plain["temperature"], plain["seed"]) == ("def f(a, b): ${x}", 0.0, 5)
    assert plain["model"]["n_layer"] == 2
    with pytest.raises(UsageError, match=r"unknown key model\.n_layer"):
        from_run(composer, "generate", "model.n_layer=2")
