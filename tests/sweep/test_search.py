"""A search with optuna: what it draws, what it stores, and how it ends poor jobs."""

import sys

import optuna
import pytest

from lmforge.config.errors import UsageError
from lmforge.config.parse import read_words
from lmforge.runs.folder import RunFolder
from lmforge.sweep import search
from lmforge.sweep.planning import Planner, corners
from lmforge.sweep.search import Search
from lmforge.sweep.start import run

SPACE = (
    "optimizer.lr=tag(log, interval(1e-4, 1e-2))", "model.n_layer=interval(2, 5)", "model.d_ff=range(128,513,64)",
    "optimizer.betas=choice([0.9,0.95],[0.8,0.9])", "model.norm=rms,layer", "seed=3",
)  # fmt: skip


@pytest.fixture
def settings(composer, compose):
    return dict(composer.base(compose.words("sweep=optuna"))["sweep"])


@pytest.fixture
def planner(composer, compose):
    return Planner(composer, compose.words(*SPACE, multirun=True), ())


def draw(folder, settings, planner, count, loss=lambda job: job.plain["optimizer"]["lr"]):
    """Jobs that end at once."""
    source = Search(folder, settings, planner, parallel=False)
    for _ in range(count):
        job = source.next()
        job.status, job.value = "done", loss(job)
        source.tell(job)
    return source


def test_values_lie_in_their_spaces_and_in_the_config(tmp_path, settings, planner):
    jobs = draw(tmp_path, settings, planner, 8).jobs
    for job in jobs:
        model, optimizer = job.plain["model"], job.plain["optimizer"]
        assert 1e-4 <= optimizer["lr"] <= 1e-2
        assert model["d_ff"] in range(128, 513, 64)
        assert model["n_layer"] in (2, 3, 4, 5)
        assert optimizer["betas"] in ([0.9, 0.95], [0.8, 0.9])
        assert job.swept["optimizer.lr"] == repr(optimizer["lr"])
        assert "seed" not in job.swept
    assert sum(job.plain["optimizer"]["lr"] < 1e-3 for job in jobs) in range(1, 8)  # even in the exponent
    assert len({job.title for job in jobs}) == 8
    assert {job.plain["model"]["norm"] for job in jobs} == {"rms", "layer"}


def test_a_job_is_made_again_from_its_words(tmp_path, settings, planner, composer):
    (job,) = draw(tmp_path, settings, planner, 1).jobs
    words = read_words(job.words, composer.tree, False, problems := [])
    assert not problems
    again = Planner(composer, words, ()).job(0, [word.value for word in words])
    assert again.plain == job.plain


@pytest.fixture
def rates(composer, compose):
    """A small space, quick to draw from."""
    return Planner(composer, compose.words("optimizer.lr=tag(log, interval(1e-4, 1e-2))", multirun=True), ())


@pytest.mark.parametrize(("sampler", "count"), [("tpe", 11), ("random", 2)])
def test_the_seed_decides_the_values_also_across_calls(tmp_path, settings, rates, sampler, count):
    """For tpe so many that the last one is learnt from the others."""
    settings["sampler"] = sampler
    for name in ("whole", "parts", "other"):
        (tmp_path / name).mkdir()
    whole = draw(tmp_path / "whole", settings, rates, count).jobs
    draw(tmp_path / "parts", settings, rates, count - 1)
    parts = draw(tmp_path / "parts", settings, rates, 1).jobs
    assert [job.title for job in parts] == [job.title for job in whole]
    assert len({job.title for job in whole}) == count
    other = draw(tmp_path / "other", settings | {"sampler_seed": 1}, rates, 2).jobs
    assert not {job.title for job in other} & {job.title for job in whole}


def test_the_sampler_learns(tmp_path, settings, rates):
    drawn = [job.plain["optimizer"]["lr"] for job in draw(tmp_path, settings, rates, 16).jobs]
    assert sum(drawn[10:]) / 6 < 0.5 * sum(drawn[:10]) / 10


def test_a_trial_that_was_cut_short_goes_on_with_its_values(tmp_path, settings, planner):
    source = draw(tmp_path, settings, planner, 2)
    cut = source.next()
    again = Search(tmp_path, settings | {"trials": 4}, planner, parallel=False)
    assert [job.status for job in again.jobs] == ["done", "done", "waiting"]
    first, second, none = again.next(), again.next(), again.next()
    assert (first.number, first.title, first.plain) == (2, cut.title, cut.plain)
    assert second.number == 3
    assert none is None
    again.tell(first)  # interrupted once more: stays open


def test_a_trial_that_was_cut_short_while_it_was_drawn(tmp_path, settings, planner):
    source = draw(tmp_path, settings, planner, 1)
    trial = source.study.ask()
    trial.suggest_float("optimizer.lr", 1e-4, 1e-2, log=True)
    again = Search(tmp_path, settings, planner, parallel=False)
    assert again.next().plain["optimizer"]["lr"] == trial.params["optimizer.lr"]


def test_states_of_the_study(tmp_path, settings, rates):
    source = Search(tmp_path, settings, rates, parallel=False)
    for status, value in (("done", 1.0), ("failed", None), ("pruned", None), ("refused", None), ("done", None)):
        job = source.next()
        job.status, job.value = status, value
        source.tell(job)
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "PRUNED", "FAIL", "FAIL"]
    assert [job.status for job in Search(tmp_path, settings, rates, parallel=False).jobs] == [
        "done", "failed", "pruned", "failed", "failed",
    ]  # fmt: skip


@pytest.mark.parametrize(("pruner", "ends"), [("median", True), ("asha", True), ("none", False)])
def test_poor_jobs_are_hopeless(tmp_path, settings, rates, pruner, ends):
    settings |= {"pruner": pruner, "pruner_warmup_steps": 2, "pruner_startup_trials": 2}
    source = Search(tmp_path, settings, rates, parallel=False)

    def measured(losses):
        job = source.next()
        run = RunFolder(tmp_path / str(job.number))
        run.path.mkdir()
        rows = [f"{step},{loss}\n" for step, loss in enumerate(losses, 1)]
        (run.path / "metrics.csv").write_text("step,val/loss\n" + "".join(rows) + "9,torn")
        hopeless = source.hopeless(job, run)
        job.status, job.value = "done", losses[-1]
        source.tell(job)
        return hopeless

    assert not any(measured([5.0, 1.0 - i / 10, 0.5]) for i in range(4))
    assert measured([5.0, 9.0]) == ("worse than the others at step 2" if ends else None)
    assert not measured([9.0])  # before the warm-up's end nothing is judged
    assert not measured([5.0, 0.1])


def test_a_point_that_is_drawn_again_keeps_its_result(tmp_path, settings, composer, compose):
    planner = Planner(composer, compose.words("seed=1,2", multirun=True), ())
    source = Search(tmp_path, settings, planner, parallel=False)
    losses = {"1": 3.0, "2": 4.0}
    trained = 0
    for _ in range(6):
        job = source.next()
        if job.status == "waiting":
            trained += 1
            job.status, job.value = "done", losses[job.swept["seed"]]
        source.tell(job)
    assert trained == 2
    assert [job.value for job in source.jobs] == [losses[job.swept["seed"]] for job in source.jobs]
    originals = {job.number for job in source.jobs if not job.reason}
    assert {int(job.reason.rsplit(" ", 1)[1]) for job in source.jobs if job.reason} <= originals
    assert [trial.value for trial in source.study.trials] == [job.value for job in source.jobs]


def test_corners_span_the_space(planner):
    jobs = corners(planner)
    assert [job.plain["optimizer"]["lr"] for job in jobs] == [1e-4, 1e-2, 1e-2]
    assert [job.plain["model"]["d_ff"] for job in jobs] == [128, 320, 512]


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install -e '.\[sweep\]'"):
        search.import_optuna()


def test_a_broken_study_is_named(tmp_path, settings, rates):
    (tmp_path / "study.db").write_text("no database, however long one looks at it" * 10)
    with pytest.raises(UsageError, match="cannot be used as the sweep's study"):
        Search(tmp_path, settings, rates, parallel=False)


def test_no_further_job_after_the_timeout(tmp_path, settings, planner):
    assert Search(tmp_path, settings | {"timeout_minutes": 1e-9}, planner, parallel=False).next() is None


WORDS = ("sweep=optuna", "optimizer.lr=interval(1e-4, 1e-2)", "model.n_layer=choice(2,4)")


def test_a_search_from_its_words_to_its_table(sweep):
    """A failed job is counted and does not stop the others; nothing of the sweep is in a job's config."""
    output = sweep("-m", *WORDS, "sweep.trials=3", code=1, FAIL="1")
    assert sweep.column("status") == ["done", "failed", "done"]
    stored = [RunFolder(sweep.path / str(job)).load_plain() for job in range(3)]
    assert [repr(config["optimizer"]["lr"]) for config in stored] == sweep.column("optimizer.lr")
    assert not any("sweep" in config for config in stored)
    best = min((row for row in sweep.table() if row["val/loss"]), key=lambda row: float(row["val/loss"]))
    assert f"best  job {best['job']}, " in output
    assert f"python train.py optimizer.lr={best['optimizer.lr']} model.n_layer={best['model.n_layer']}\n" in output
    assert "can be pruned: trainer.val_every_n_steps=null" in output


def test_jobs_that_measured_nothing_are_no_failures_when_the_search_goes_on(sweep):
    words = ("sweep=optuna", "sweep.trials=2", "seed=interval(1,1000)", "sweep.metric=val/accuracy", "sweep.mode=max")
    assert "no job has measured val/accuracy" in sweep(*words)
    sweep(f"sweep.folder={sweep.path}")
    assert sweep.column("status") == ["done"] * 2


def test_a_pruned_job_is_ended_and_is_no_failure(sweep):
    """The second job has the larger loss, and waits until it is ended."""
    words = ("sweep=optuna", "model.n_layer=choice(2,4)", "sweep.trials=2", "sweep.sampler=random")
    output = sweep(*words, "sweep.pruner_startup_trials=1", "trainer.val_every_n_steps=1", HOLD="1")
    assert sweep.column("model.n_layer") == ["2", "4"]
    assert sweep.column("status") == ["done", "pruned"]
    assert "job 1 (model.n_layer=4) pruned: worse than the others at step" in output
    assert "best  job 0" in output
    assert "Terminated: saved" in (sweep.path / "1" / "job.log").read_text()
    assert "is finished; a larger sweep.trials goes on" in sweep(f"sweep.folder={sweep.path}")
    sweep("-m", f"sweep.folder={sweep.path}", "sweep.trials=3", HOLD="2")
    assert sweep.column("status") == ["done", "pruned", "pruned"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lr=interval(-1, 1)"], "optimizer.lr=interval(-1, 1): optimizer.lr=-1.0: not allowed"),
        (["optimizer.lr=1e-3"], "nothing to search"),
        (["optimizer.lrr=interval(1, 2)"], "did you mean optimizer.lr?"),
        (["seed=1,2", "sweep.sampler=gp"], "allowed: one of tpe, random"),
        (["model.d_model=8", "model.n_head=choice(3,5)", "model.n_kv_head=1"], "must divide model.d_model"),
        (["seed=1,2", "sweep.rerun_failed=true"], "a key of sweep=grid only"),
    ],
)
def test_wrong_words_end_the_search_before_it_starts(composer, tmp_path, words, said):
    read = read_words(["sweep=optuna", *words], composer.tree, True, problems := [])
    with pytest.raises(UsageError) as refused:
        run(composer, read, (), problems, ["train.py"])
    assert said in str(refused.value)
    assert not (tmp_path / "runs").exists()
