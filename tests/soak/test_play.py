"""The engine against a stand-in for train.py that can be told to misbehave: what it does wrong is what is judged."""

import json
import shutil
from pathlib import Path

import pytest

from lmforge.config.errors import UsageError
from lmforge.soak import play
from lmforge.soak.command import Soak, SoakFailed, begin, finish
from lmforge.soak.play import Play


@pytest.fixture
def soaked(tmp_path, monkeypatch):
    """Two faults on a training of 60 steps; the soak, and its verdicts by name."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").touch()
    shutil.copy(Path(__file__).with_name("fake_train.py"), tmp_path / "train.py")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "lmforge")])
    monkeypatch.setattr(play, "LEAVE_SECONDS", 0.5)
    (tmp_path / "work").mkdir()

    def run(
        *plan: tuple[str, int], faulty: str = "", hang_seconds: float = 20.0
    ) -> tuple[Soak, dict[str, bool | None]]:
        found = begin(tmp_path / "work", f"faulty={faulty}", 60, 5, hang_seconds)
        one = Play(found.setup, "faults")
        found.plays.append(one)
        one.run(plan)
        found.compare(one)
        return found, {verdict.what: verdict.passed for verdict in found.verdicts(20, 8)}

    return run


def failing(verdicts: dict[str, bool | None]) -> list[str]:
    return [what for what, passed in verdicts.items() if passed is False]


def test_what_recovers_passes_with_its_moment_proven(soaked) -> None:
    found, verdicts = soaked(("kill the job", 7), ("kill the job in a save", 3), ("SIGTERM to one rank", 6))
    assert failing(verdicts) == []
    assert verdicts["memory of a rank"] is None
    killed, saving, asked = found.strikes
    assert (killed.code, saving.code, asked.code) == (-9, -9, 143)
    assert all(strike.recovered and (strike.seconds or 0) > 0 for strike in found.strikes)
    step = int(killed.moment.removeprefix("step "))
    assert step - 10 < killed.resumed <= step // 5 * 5
    assert saving.moment == f"save of step {saving.resumed + 5}"
    assert asked.moment == f"step {asked.resumed}"


def test_what_the_run_does_not_prove_does_not_count(soaked) -> None:
    found, verdicts = soaked(("corrupt checkpoint", 12))  # the stand-in does not look at what it reads
    assert [strike.moment for strike in found.strikes] == [""]
    assert failing(verdicts) == ["faults recovered from"]


@pytest.mark.parametrize(
    ("faulty", "fault", "wrong"),
    [
        ("repeats", "kill the job", ["samples lost", "samples repeated"]),
        ("loss", "kill the job", ["trainings like the reference"]),
        ("code", "SIGTERM to one rank", ["faults recovered from"]),
        ("leaves", "SIGTERM to one rank", ["processes left behind"]),
        ("dirty", "kill the job", ["files left behind"]),
    ],
)
def test_each_misbehaviour_fails_its_own_verdict(soaked, faulty, fault, wrong) -> None:
    _, verdicts = soaked((fault, 6), faulty=faulty)
    assert failing(verdicts) == wrong


def test_a_training_that_hangs_is_ended(soaked) -> None:
    found, verdicts = soaked(("kill the job", 12), faulty="hangs", hang_seconds=1.5)
    assert "hangs" in failing(verdicts)
    assert "on the way to the start after kill the job" in found.plays[0].hangs[0]
    assert not found.plays[0].trainings[-1].members()


def test_a_fault_that_comes_after_the_end_does_not_count(soaked) -> None:
    found, _ = soaked(("kill the job", 5), ("kill the job", 1000))
    assert len(found.strikes) == 1
    assert found.plays[0].code == 0


def test_the_report_holds_every_fault_and_verdict(soaked, tmp_path, capsys) -> None:
    found, _ = soaked(("kill the job", 7))
    finish(found, found.verdicts(20, 8), tmp_path / "reports" / "soak.json", {"hours": 1})
    written = json.loads((tmp_path / "reports" / "soak.json").read_text())
    assert written["passed"] is True
    assert [fault["fault"] for fault in written["faults"]] == ["kill the job"]
    assert len(written["verdicts"]) == 9
    shown = capsys.readouterr().out
    assert "kill the job" in shown
    assert "not judged" in shown


@pytest.mark.parametrize(("code", "error"), [(1, SoakFailed), (2, UsageError)])
def test_a_training_that_fails_without_faults_is_no_soak(soaked, tmp_path, code, error) -> None:
    (tmp_path / "train.py").write_text(f"print('strategy=fspd: unknown'); raise SystemExit({code})")
    with pytest.raises(error, match="strategy=fspd: unknown"):
        begin(tmp_path / "work", "strategy=fspd", 60, 5, 5.0)
