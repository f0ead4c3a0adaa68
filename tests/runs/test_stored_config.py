"""Typed words on top of a stored run: resume, evaluate, generate."""

import json

import pytest

from lmforge.config import machine
from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.config.parse import read_words
from lmforge.runs.folder import RunFolder
from lmforge.runs.plan import continue_run, plan_from_run


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
    run = compose.run(
        "model.n_layer=2", "model.context=128", "optimizer=adamw", "optimizer.lr=1e-3", "trainer.max_steps=10"
    )
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
    assert plan.plain["strategy"]["reshard_after_forward"] is True
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


@pytest.fixture
def elsewhere(monkeypatch):
    """Another machine: other hardware decides otherwise about precision and threads."""

    def move(word, threads=7):
        monkeypatch.setattr(machine, "resolve_precision", lambda typed, kind: word if typed == "auto" else typed)
        monkeypatch.setattr(machine, "thread_share", lambda processes: max(1, threads // processes))

    return move


@pytest.mark.parametrize("words", [["resume=auto"], ["resume=auto", "precision=auto"]])
def test_auto_finds_its_run_on_another_machine(compose, elsewhere, words):
    elsewhere("bf16-mixed")
    run = compose.run()
    elsewhere("32-true", threads=3)
    plan = compose.plan(*words)
    continue_run(plan)
    assert plan.run.id == run.id
    assert plan.plain["precision"] == run.load_plain()["precision"]
    assert plan.plain["trainer"]["threads"] == 7
    assert not plan.changed
    assert sum("this machine chooses 32-true" in note for note in plan.notes) == 1


@pytest.mark.parametrize(
    ("trained", "typed"), [("precision=64-true", "precision=auto"), ("precision=bf16-mixed", "precision=32-true")]
)
def test_auto_does_not_take_a_run_of_another_typed_precision(compose, trained, typed):
    compose.run(trained)
    plan = compose.plan("resume=auto", typed)
    continue_run(plan)
    assert plan.run is None


def test_threads_stay_unless_typed_again_or_shared_by_more(compose, elsewhere):
    elsewhere("32-true", threads=8)
    run = compose.run()
    assert run.load_plain()["trainer"]["threads"] == 8
    elsewhere("32-true", threads=4)
    threads = {
        (): 8,
        ("trainer.threads=2",): 2,
        ("trainer.threads=auto",): 4,
        ("trainer.devices=2",): 2,
    }
    for words, number in threads.items():
        assert resumed(compose, run, *words).plain["trainer"]["threads"] == number, words


def test_missing_weights_do_not_matter_to_a_run_that_has_begun(compose, tmp_path):
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    run = compose.run("weights=weights.safetensors")
    words = ["resume=auto", f"weights={weights}"]
    weights.unlink()
    assert resumed(compose, run).run.id == run.id
    plan = compose.plan(*words)
    continue_run(plan)
    assert plan.run.id == run.id
    with pytest.raises(UsageError, match="no such run, folder or file"):
        continue_run(compose.plan(*words, "seed=5"))


def test_inputs_are_stored_so_that_any_folder_will_do(compose, tmp_path, monkeypatch):
    (tmp_path / "text.md").write_text("text")
    (tmp_path / "weights").touch()
    words = ["data=text", "weights=weights"]
    run = compose.run(*words, "data.path=text.md")
    stored = run.load_plain()
    assert (stored["data"]["path"], stored["weights"]) == (str(tmp_path / "text.md"), str(tmp_path / "weights"))
    assert stored["paths"]["cache"] == str(tmp_path / ".cache")
    assert not run.path.is_absolute()
    assert compose.plan(*words, "data.path=*.md").plain["data"]["path"] == str(tmp_path / "*.md")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert not resumed(compose, RunFolder(tmp_path / run.path), "data.path=../text.md").changed


def test_auto_reports_what_it_changes(compose, run):
    plan = compose.plan(
        "resume=auto",
        "model.n_layer=2",
        "model.context=128",
        "optimizer=adamw",
        "optimizer.lr=1e-3",
        "trainer.max_steps=12",
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


def test_evaluate_leaves_training_aids_behind(compose, composer):
    trained = compose.run("compile=eager", "trainer.activation_checkpointing=1")
    (trained.checkpoints / "step-00000001").mkdir()
    for name in ("evaluate", "generate"):
        plain = from_run(composer, name).plain
        assert (plain["compile"], plain["trainer"]["activation_checkpointing"]) == ({"backend": None}, 0)


@pytest.mark.usefixtures("run")
def test_evaluate_on_the_train_split(composer):
    assert from_run(composer, "evaluate", "split=train").plain["split"] == "train"


def test_evaluate_lists_model_keys_that_differ(composer, run):
    assert from_run(composer, "evaluate", "model.n_layer=2")
    with pytest.raises(UsageError) as error:
        from_run(composer, "evaluate", "model.n_layer=4", "model.bias=true")
    assert "model.n_layer=4 (the run has 2), model.bias=true (the run has false)" in str(error.value)


def test_evaluate_on_other_text(composer, run, tmp_path):
    (tmp_path / "a=b.txt").write_text("text")
    data = from_run(composer, "evaluate", "data=text", "data.path=a=b.txt").plain["data"]
    assert data["_target_"].endswith("TextData")
    assert (data["path"], data["context"]) == ("a=b.txt", 128)
    assert data["tokenizer"] is None
    (run.path / "tokenizer.json").write_text("{}")
    data = from_run(composer, "evaluate", "data=text", "data.path=a=b.txt").plain["data"]
    assert data["tokenizer"] == str(tmp_path / run.path / "tokenizer.json")
    (tmp_path / "own.json").write_text("{}")
    words = ["data=text", "data.path=a=b.txt", "data.tokenizer=own.json"]
    assert from_run(composer, "evaluate", *words).plain["data"]["tokenizer"] == "own.json"


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
