"""The words of a mixture: sources are named by the user, typed plainly, and checked together."""

import pytest

from lmforge.config.errors import UsageError
from lmforge.config.plain import get

CODE = ("data=mix", "data.sources.code.path=code", "data.sources.code.weight=7")
PROSE = ("data.sources.prose.path=a b, c", "data.sources.prose.weight=3")


@pytest.fixture(autouse=True)
def places(tmp_path):
    for name in ("code", "a b, c"):
        (tmp_path / name).mkdir()


def test_sources_are_typed_plainly_and_their_shares_said(compose, tmp_path):
    plan = compose.plan(*CODE, *PROSE)
    assert plan.plain["data"]["sources"] == {
        "code": {"path": str(tmp_path / "code"), "weight": 7.0},
        "prose": {"path": str(tmp_path / "a b, c"), "weight": 3.0},
    }
    assert "mixture     code 0.7, prose 0.3 of the tokens (weights divided by 10)" in plan.notes
    one = compose.plan(*CODE, *PROSE, "data.sources.prose=null", "data.sources.code.weight=1")
    assert "mixture     code 1 of the tokens" in one.notes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("data=mix",), r"data.sources: a mixture needs sources; type data.sources.NAME.path"),
        ((*CODE, "data.sources.code.weight=0"), r"data.sources.code.weight=0: not allowed; allowed: a number above 0"),
        ((*CODE, "data.sources.code.weight=-1"), r"data.sources.code.weight=-1: not allowed"),
        ((*CODE, "data.sources.b.path=x"), r"b.weight must be given: .*\n.*data.sources.b.path=x: no such file"),
        ((*CODE, "data.sources.b.weight=1"), r"data.sources.b.path must be given"),
        ((*CODE, "data.sources.b.wieght=1"), r"b.wieght=1: unknown key .*did you mean data.sources.b.weight\?"),
        ((*CODE, "data.sources=code"), r"data.sources=code: data.sources holds several keys"),
        ((*CODE, "trainer.max_epochs=2"), r"trainer.max_epochs=2: the sources of a mixture end at different times"),
        ((*CODE, "data.sources._b.path=code", "data.sources._b.weight=1"), r"data.sources._b: not a name for a source"),
        ((*CODE, "data.sources.code.split=test"), r"code.split=test: only a data set has one"),
        ((*CODE, "data.sources.code.name=a/b"), r"data.sources.code.path must be given: .*; not both"),
        (("data=mix", "data.sources.b.name=a/b/c", "data.sources.b.weight=1"), r"b.name=a/b/c: no such file or folder"),
        (("data.sources.code.path=code",), r"data.sources.code.path is a key of data=mix only"),
        (("logger.wandb.project=x",), r"logger.wandb.project is a key of logger=wandb only"),
        ((*CODE, "data.sources.b.path=code", "data.sources.b.weight=1e-9"), r"less than one row in 10000"),
    ],
)
def test_what_is_wrong_is_said_by_key(compose, composer, words, problem):
    with pytest.raises(UsageError, match=r"(?s)" + problem):
        compose.plan(*words)


def test_keys_for_text_are_refused_for_shards(compose, tmp_path):
    (tmp_path / "code" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=r"data.sources.code.text_key=body: token shards are read already"):
        compose.plan(*CODE, "data.sources.code.text_key=body")


def test_a_resumed_run_keeps_its_mixture(compose):
    run = compose.run(*CODE, *PROSE)
    assert compose.plan(f"resume={run.path}").plain["data"] == run.load_plain()["data"]
    for word in ("data.sources.code.weight=2", "data.sources.new.path=code", "data.sources.prose=null"):
        with pytest.raises(UsageError, match=r"data.sources.*this cannot change on resume"):
            compose.plan(f"resume={run.path}", word)


def test_entries_of_other_groups_stay_closed(compose):
    with pytest.raises(UsageError, match=r"unknown key callbacks.mine.every_n_steps"):
        compose.plan("callbacks.mine.every_n_steps=3")
    with pytest.raises(UsageError, match=r"unknown key .*did you mean callbacks.checkpoint.every_n_steps\?"):
        compose.plan("callbacks.checkpoint.every_steps=3")
    assert get(compose.plain(*CODE), "data.sources.code.weight") == 7.0
