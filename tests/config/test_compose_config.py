import shutil

import pytest
import yaml

from lmforge.config.compose import Composer
from lmforge.config.parse import Tree, read_words
from lmforge.config.plain import dump_yaml, flatten, get, to_config, to_plain


def test_typed_beats_debug_beats_experiment_beats_groups(compose):
    assert compose.plain("experiment=gpt2-124m", "data.path=x")["trainer"]["max_steps"] == 19073
    debug = compose.plain("experiment=gpt2-124m", "debug=fast", "data.path=x")
    assert (debug["trainer"]["max_steps"], debug["model"]["n_layer"], debug["optimizer"]["lr"]) == (3, 2, 6e-4)
    typed = compose.plain("experiment=gpt2-124m", "debug=fast", "data.path=x", "trainer.max_steps=5", "model=nano")
    assert typed["trainer"]["max_steps"] == 5
    assert typed["model"]["activation"] == "swiglu"


def test_null_takes_a_preset_out(compose, tree, tmp_path):
    assert compose.plain("experiment=null", "debug=null") == compose.plain()
    folder = tmp_path / "configs"
    shutil.copytree(tree.folder, folder)
    main = folder / "train.yaml"
    main.write_text(main.read_text().replace("- debug: null", "- debug: fast"))
    composer = Composer("train", Tree(folder))
    assert composer.compose([]).plain["name"] == "debug"
    assert composer.compose(compose.words("debug=null")).plain == compose.plain()


def test_numbers_without_a_dot_from_file_and_command_line(tree, tmp_path, compose):
    folder = tmp_path / "configs"
    shutil.copytree(tree.folder, folder)
    file = folder / "optimizer" / "adamw.yaml"
    file.write_text(file.read_text().replace("lr: 0.002", "lr: 1e-4"))
    from_file = Composer("train", Tree(folder)).compose(compose.words("optimizer=adamw")).plain
    typed = compose.plain("optimizer=adamw", "optimizer.lr=1e-4")
    for plain in (from_file, typed):
        stored = yaml.safe_load(dump_yaml(plain))
        assert stored["optimizer"]["lr"] == 0.0001
        assert isinstance(stored["optimizer"]["lr"], float)
    assert compose.plain("optimizer.lr=1e4")["optimizer"]["lr"] == 10000.0


def test_one_batch_word_unsets_the_other(compose):
    assert compose.plain("batch.sequences=8")["batch"] == {"tokens": None, "sequences": 8, "micro_sequences": "auto"}
    both = compose.plain("batch.sequences=8", "batch.tokens=2048")["batch"]
    assert (both["tokens"], both["sequences"]) == (2048, 8)


def test_all_problems_at_once(composer, compose):
    words = compose.words("optimizer.lr=fast", "trainer.max_stesp=3", "seed=-1", "data.path=x")
    problems = composer.compose(words).problems
    assert problems["optimizer.lr"] == "optimizer.lr=fast: not allowed; allowed: a number above 0"
    assert "did you mean trainer.max_steps?" in problems["trainer.max_stesp"]
    assert "seed=-1" in problems["seed"]
    assert "key of data=text, data=tokens only" in problems["data.path"]


def test_group_given_a_dict(tree):
    problems = []
    read_words(["model={n_layer: 2}"], tree, False, problems)
    assert "choices: gpt2-124m, gpt2-355m, nano" in problems[0]


@pytest.mark.parametrize("word", ["callbacks.samples=null", "~callbacks.samples"])
def test_entries_can_be_switched_off(compose, word):
    assert compose.plain(word)["callbacks"]["samples"] is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("~model.bias", "only entries of callbacks and logger"),
        ("callbacks.samples=1", "holds several keys"),
        ("+optimizer.lrr=1", "did you mean optimizer.lr?"),
    ],
)
def test_words_that_do_not_fit_the_tree(composer, compose, word, said):
    (problem,) = composer.compose(compose.words(word)).problems.values()
    assert said in problem


def test_missing_value_is_named(composer, compose):
    assert composer.compose(compose.words("data=text")).problems == {"data.path": "data.path must be given: a path"}


def test_missing_environment_variable_is_named(tree, tmp_path, compose):
    folder = tmp_path / "configs"
    shutil.copytree(tree.folder, folder)
    file = folder / "logger" / "wandb.yaml"
    file.write_text(file.read_text().replace("project: lmforge", "project: ${oc.env:TEST_NO_SUCH_VARIABLE}"))
    composer = Composer("train", Tree(folder))
    assert composer.compose([]).problems == {}
    problems = composer.compose(compose.words("logger=wandb")).problems
    assert problems == {"logger.wandb.project": "logger.wandb.project: needs the environment variable "
                        "TEST_NO_SUCH_VARIABLE, which is not set"}  # fmt: skip


TEXTS = ["${oc.env:HOME}", "a\\${b}", "\\\\${c}", "plain $x", "{brace} 'quote' \"two\" \n line"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_never_a_reference(text):
    config = to_config({"part": {"text": text, "many": [text]}})
    assert config.part.text == text
    assert to_plain(config) == {"part": {"text": text, "many": [text]}}
    assert to_plain(to_config(yaml.safe_load(dump_yaml(to_plain(config))))) == to_plain(config)


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError):
        _ = to_config({"seed": 1}).sede


def test_flatten_and_get():
    plain = {"a": {"b": 1, "c": [1]}, "d": {}, "e": None}
    assert dict(flatten(plain)) == {"a.b": 1, "a.c": [1], "e": None}
    assert (get(plain, "a.b"), get(plain, "a.x", 5), get(plain, "e.f")) == (1, 5, None)
