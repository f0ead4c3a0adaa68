"""Who makes missing shards and who waits. `lmforge prepare` is a process of its own here too."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.data import missing as module
from lmforge.data.missing import make_missing
from texts import NODE, prepared

TEXT = {**NODE, "_target_": "lmforge.data.module.TextData"}


def _torchrun(rank):
    return Launch("torchrun", rank=rank, world_size=2, local_rank=rank, local_world_size=2)


def _rank(rank, data, cache, ends):
    try:
        make_missing(data, cache, _torchrun(rank))
        ends.put((rank, None))
    except UsageError as error:
        ends.put((rank, error.problems))


def _both(data, cache, delay=0.0):
    """The end of either rank: None, or what was wrong."""
    context = multiprocessing.get_context("fork")
    ends = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, data, cache, ends)) for rank in (1, 0)]
    for rank in ranks:
        rank.start()
        time.sleep(delay)
    found = dict(ends.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(timeout=10)
    return found


def test_one_rank_has_them_made_and_the_other_waits(corpus, cache, capfd):
    assert _both(TEXT | {"path": str(corpus)}, cache, delay=0.5) == {0: None, 1: None}
    folder = prepared(corpus, cache, make=False)
    said = capfd.readouterr().err
    assert said.count("preparing data=text") == said.count(f"in {folder}") == 1
    assert _both(TEXT | {"path": str(corpus)}, cache) == {0: None, 1: None}
    assert "preparing" not in capfd.readouterr().err


def test_damaged_shards_are_waited_for_as_missing_ones_are(corpus, cache, monkeypatch):
    folder = prepared(corpus, cache)
    sound = (folder / "train-00000.tokens").read_bytes()
    (folder / "train-00000.tokens").write_bytes(sound[:-2])
    looks = []
    shards_of = module.shards_of

    def looking(*args, **how):
        looks.append(None)
        assert len(looks) < 3, "waits without pause"
        if len(looks) == 2:
            prepared(corpus, cache)
        return shards_of(*args, **how)

    monkeypatch.setattr(module, "shards_of", looking)
    paused = []
    monkeypatch.setattr(module.time, "sleep", paused.append)
    make_missing(TEXT | {"path": str(corpus)}, cache, _torchrun(1))
    assert (folder / "train-00000.tokens").read_bytes() == sound
    assert paused == [module._POLL_SECONDS]


def test_what_is_wrong_ends_all_and_is_said_once(tmp_path, cache, capfd):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nbroken\n')
    found = _both(TEXT | {"path": str(tmp_path / "bad.jsonl")}, cache, delay=0.5)
    assert found[1] == []
    assert [f"{tmp_path / 'bad.jsonl'}:2: broken JSON" in problem for problem in found[0]] == [True]
    assert "broken JSON" not in capfd.readouterr().err  # left to the rank that raised
    assert not list(cache.glob("tokens/*/"))


def test_a_rank_does_not_wait_for_a_launcher_that_is_gone(corpus, cache, monkeypatch):
    parents = iter([1, 1, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 2))
    with pytest.raises(UsageError) as ended:
        make_missing(TEXT | {"path": str(corpus)}, cache, _torchrun(1))
    assert ended.value.problems == []


def test_a_failure_of_an_earlier_start_is_not_this_one(corpus, cache, monkeypatch):
    folder = cache / "tokens" / "text-x"
    assert module._failure(folder) == module._failure(folder)
    before = module._failure(folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert module._failure(folder) != before


def test_a_process_that_is_killed_is_named(corpus, cache, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match=r"could not be prepared: .* ended with code 1"):
        make_missing(TEXT | {"path": str(corpus)}, cache, Launch())


def test_the_child_is_no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LMFORGE_RUN", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LMFORGE_RUN", "SLURM_PROCID"} & set(
        module._without_launcher()
    )
    assert module._without_launcher()["PATH"] == os.environ["PATH"]


def test_ready_shards_need_nothing(tmp_path):
    data = {"_target_": "lmforge.data.module.TokenData", "path": str(tmp_path)}
    make_missing(data, Path("/nowhere"), Launch())
