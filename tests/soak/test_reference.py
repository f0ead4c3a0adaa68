"""Samples that were lost or seen twice, told from those of updates that were undone."""

from collections import Counter
from pathlib import Path

from lmforge.soak.reference import Difference, compare, left_files, samples


def run(folder: Path, **ranks: str) -> Path:
    (folder / "probe").mkdir(parents=True)
    for rank, lines in ranks.items():
        (folder / "probe" / f"rank-0000{rank[1]}.txt").write_text(lines)
    return folder


def test_an_update_done_again_counts_once(tmp_path) -> None:
    found = samples(run(tmp_path, r0="1 a\n2 c\n3 e\n2 c\n3 e\n", r1="1 b\n2 d\n2 d\n3 f\n"))
    assert found == {1: Counter("ab"), 2: Counter("cd"), 3: Counter("ef")}


def test_lost_and_repeated_are_counted_apart(tmp_path) -> None:
    whole = samples(run(tmp_path / "whole", r0="1 a\n2 b\n3 c\n4 d\n"))
    ours = samples(run(tmp_path / "ours", r0="1 a\n2 b\n3 b\n4 d\n"))
    assert compare(ours, whole, range(1, 5)) == Difference(1, 1)
    assert compare(ours, whole, range(1, 3)) == Difference(0, 0)
    assert compare({1: Counter("a")}, whole, range(1, 5)) == Difference(3, 0)


def test_leftovers_are_found(tmp_path) -> None:
    (tmp_path / "checkpoints" / ".step-00000004.part").mkdir(parents=True)
    (tmp_path / ".metrics.csv.17.tmp").touch()
    (tmp_path / ".lock").touch()
    assert left_files(tmp_path) == [".metrics.csv.17.tmp", "checkpoints/.step-00000004.part"]
