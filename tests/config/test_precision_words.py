"""The dtypes of a precision are its file's, whoever asks for others."""

import pytest
import yaml

from lmforge.config.errors import UsageError
from lmforge.config.plain import dump_yaml


@pytest.mark.parametrize(
    "typed",
    ["precision.compute=float16", "precision.word=bf16-mixed", "precision.scaler=true", "precision.weights=null"],
)
@pytest.mark.parametrize("group", ["precision=auto", "precision=32-true"])
def test_typed_dtypes_are_refused(compose, group, typed):
    with pytest.raises(UsageError) as error:
        compose.plan(group, typed)
    (problem,) = error.value.problems
    assert problem.startswith(f"{typed}: follows from the word; choose precision=WORD (auto, 32-true")


def test_repeating_what_the_word_means_is_no_problem(compose):
    assert compose.plan("precision=16-mixed", "precision.compute=float16").plain["precision"]["scaler"] is True


@pytest.mark.parametrize(("key", "value"), [("compute", "float16"), ("scaler", True)])
def test_a_stored_config_is_held_to_its_word(compose, key, value):
    run = compose.run("precision=32-true")
    plain = yaml.safe_load(run.config_file.read_text())
    plain["precision"][key] = value
    run.config_file.write_text(dump_yaml(plain))
    with pytest.raises(UsageError) as error:
        compose.plan(f"resume={run.path}")
    assert f"precision.{key}={value}: precision=32-true means" in str(error.value)
    assert "choose precision=WORD" in str(error.value)
