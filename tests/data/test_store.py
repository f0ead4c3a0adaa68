"""The cache: one at work at a time, damage, kills, full disks, what is cleaned away."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmforge.config.errors import UsageError
from lmforge.data import parts, prepare, spool, store
from texts import files_in, jsonl, names_of, prepared, some_text


@pytest.mark.parametrize("damage", ["cut", "flip", "no manifest", "tokenizer"])
def test_a_damaged_cache_is_made_again(corpus, cache, damage, caplog):
    folder = prepared(corpus, cache)
    sound = files_in(folder)
    tokens = sound["train-00000.tokens"]
    name, content = {
        "cut": ("train-00000.tokens", tokens[:-2]),
        "flip": ("train-00000.tokens", bytes([tokens[0] ^ 1]) + tokens[1:]),
        "no manifest": ("manifest.json", b""),
        "tokenizer": ("tokenizer.json", sound["tokenizer.json"] + b" "),
    }[damage]
    (folder / name).write_bytes(content)
    assert prepared(corpus, cache) == folder
    assert files_in(folder) == sound
    assert "prepared again" in caplog.text


def test_a_folder_that_another_process_is_replacing_is_not_whole(corpus, cache, monkeypatch):
    folder = prepared(corpus, cache)
    assert store.is_whole(folder)

    def gone(*_):
        raise FileNotFoundError(errno.ENOENT, "No such file", "train-00000.tokens")

    monkeypatch.setattr(store.TokenShards, "verify", gone)
    assert not store.is_whole(folder)


def _together(start, corpus, cache, folders):
    start.wait()
    folders.put(prepared(corpus, cache))


def test_two_at_once_work_once(corpus, cache, monkeypatch):
    log = cache.parent / "builds"
    build = prepare.build

    def counted(*arguments):
        with log.open("a") as file:
            file.write("build\n")
        time.sleep(0.5)
        build(*arguments)

    monkeypatch.setattr(prepare, "build", counted)
    context = multiprocessing.get_context("fork")
    start, folders = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_together, args=(start, str(corpus), cache, folders)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = {folders.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(found) == 1
    assert log.read_text() == "build\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from lmforge.data import spool
spool.PART = 1000
save = spool.Spool.save
left = int(sys.argv[3])
def counted(self, part, suffix, array):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    save(self, part, suffix, array)
spool.Spool.save = counted
from texts import prepared
prepared(sys.argv[1], Path(sys.argv[2]))
"""


def _killed(path, cache, after):
    """A preparation killed before it saves its array number `after`."""
    command = [sys.executable, "-c", KILLED, str(path), str(cache), str(after)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL


def _folders(cache):
    return sorted(path for path in (cache / "tokens").iterdir() if path.is_dir())


@pytest.mark.parametrize("after", [0, 9, 35], ids=["at once", "signing", "tokenising"])
def test_a_killed_preparation_goes_on_where_it_was(tmp_path, cache, monkeypatch, after):
    path = jsonl(tmp_path / "x.jsonl", [some_text(i) for i in range(40)])
    monkeypatch.setattr(spool, "PART", 1000)
    whole = prepared(path, tmp_path / "other")
    _killed(path, cache, after)
    (work,) = _folders(cache)
    assert work.suffix == store.WORK
    there = {file.name for file in work.glob("*.npy")}
    assert len(there) == after

    saved, save = set(), spool.Spool.save

    def noted(self, part, suffix, array):
        saved.add(self.path(part, f"{suffix}.npy").name)
        save(self, part, suffix, array)

    monkeypatch.setattr(spool.Spool, "save", noted)
    folder = prepared(path, cache)
    assert files_in(folder) == files_in(whole)
    assert saved
    assert not saved & there
    assert _folders(cache) == [folder]


def test_the_work_of_a_killed_one_is_kept_for_a_week(tmp_path, cache, corpus):
    _killed(jsonl(tmp_path / "x.jsonl", [some_text(i) for i in range(40)]), cache, 3)
    (work,) = _folders(cache)
    folder = prepared(corpus, cache)
    assert _folders(cache) == sorted([folder, work])
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(work, (long_ago, long_ago))
    prepared(corpus, cache, vocab_size=301)
    assert work not in _folders(cache)


def test_a_preparation_at_work_is_not_cleaned_away(cache):
    root = cache / "tokens"
    with store.locked(root, "text-other"):
        work = root / f"text-other{store.WORK}"
        work.mkdir()
        os.utime(work, (0, 0))
        store.remove_leftovers(root)
        assert work.exists()
    store.remove_leftovers(root)
    assert not work.exists()


def test_a_cache_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"paths\.cache"):
        prepared(corpus, tmp_path / "file")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_named_and_what_is_finished_used_again(corpus, cache, monkeypatch, workers):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as changed:
        changed.setattr(prepare.store, "is_whole", lambda folder: False)
        changed.setattr("lmforge.data.build.write_shards", full)
        with pytest.raises(UsageError, match=re.escape(f"paths.cache: cannot write in {cache / 'tokens'} (No space")):
            prepared(corpus, cache, workers=workers)
    (work,) = _folders(cache)
    assert work.suffix == store.WORK
    changed_at = {file.name: file.stat().st_mtime_ns for file in work.glob("*.npy")}
    assert changed_at
    with monkeypatch.context() as changed:
        changed.setattr(parts.Spool, "save", full)  # nothing is left to be saved
        folder = prepared(corpus, cache)
    assert sum(len(part) for part in names_of(folder).values()) == 30
    assert _folders(cache) == [folder]
