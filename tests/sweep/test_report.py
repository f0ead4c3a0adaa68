"""What the end of a sweep says."""

from pathlib import Path

from lmforge.sweep.job import Job
from lmforge.sweep.report import best, report


def job(number, status="done", value=None, reason="", **swept):
    swept = {key.replace("__", "."): shown for key, shown in swept.items()}
    words = [f"{key}={shown}" for key, shown in swept.items()]
    plain = None if status == "refused" else {}
    return Job(number, words, swept, plain, status, reason, value, 1.26)


JOBS = [
    job(0, value=2.0, optimizer__lr="0.001", seed="0"),
    job(1, value=4.0, optimizer__lr="0.001", seed="1"),
    job(2, value=1.0, optimizer__lr="0.00031622776601683794", seed="0"),
    job(3, "failed", reason="exit 3 non finite: NaN", optimizer__lr="0.00031622776601683794", seed="1"),
    job(4, "refused", reason="does not divide", optimizer__lr="1", seed="0"),
]


def test_the_whole_report():
    for number in range(4):
        Path("runs/a/b", str(number)).mkdir(parents=True)
        Path("runs/a/b", str(number), "config.yaml").touch()
    text = report(JOBS, Path("runs/a/b"), "val/loss", "min", "python train.py")
    assert text.splitlines() == [
        "job  optimizer.lr  seed  status   val/loss  seconds  run folder",
        "0    0.001         0     done     2         1.3      runs/a/b/0",
        "1    0.001         1     done     4         1.3      runs/a/b/1",
        "2    0.0003162     0     done     1         1.3      runs/a/b/2",
        "3    0.0003162     1     failed   -         1.3      runs/a/b/3  exit 3 non finite: NaN",
        "4    1             0     refused  -         1.3      -           does not divide",
        "",
        "val/loss over seeds     n  mean  std",
        "optimizer.lr=0.001      2  3     1.41",
        "optimizer.lr=0.0003162  1  1     -",
        "",
        "best  job 2, val/loss 1; again: python train.py optimizer.lr=0.00031622776601683794 seed=0",
        "",
        "sweep folder  runs/a/b",
    ]


def test_no_spread_without_two_values():
    assert "over seeds" not in report(JOBS[2:], Path("x"), "val/loss", "min", "python train.py")


def test_seeds_alone():
    jobs = [job(0, value=2.0, seed="0"), job(1, value=4.0, seed="1")]
    assert "all                  2  3     1.41" in report(jobs, Path("x"), "val/loss", "min", "python train.py")


def test_values_that_differ_in_a_late_digit_stay_apart():
    rates = ("0.0010000001", "0.0010000002")
    jobs = [job(i, value=float(i), optimizer__lr=rates[i // 2], seed=("1234567890", "1")[i % 2]) for i in range(4)]
    lines = report(jobs, Path("x"), "val/loss", "min", "python train.py").splitlines()
    assert lines[1].split()[1:3] == ["0.0010000001", "1234567890"]
    assert [line.split() for line in lines[7:9]] == [
        ["optimizer.lr=0.0010000001", "2", "0.5", "0.707"],
        ["optimizer.lr=0.0010000002", "2", "2.5", "0.707"],
    ]


def test_the_best_of_an_accuracy_is_the_highest():
    assert best(JOBS, "max") is JOBS[1]
    assert best(JOBS, "min") is JOBS[2]
    assert best(JOBS[3:], "min") is None
    assert "no job has measured val/loss" in report(JOBS[3:], Path("x"), "val/loss", "min", "python train.py")
