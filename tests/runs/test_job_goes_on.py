"""Ranks that a launcher starts again go on with the run that its job has begun, whatever was typed."""

import json
import threading
import time

import pytest
import yaml

from lmforge.config.batch import batch_plan
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.runs.going_on import continue_run, open_run

BATCH = ("batch.sequences=8", "model.context=32")


@pytest.fixture(autouse=True)
def _place_to_meet(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def of_job(job, restarts=0, ranks=2):
    return Launch("torchrun", world_size=ranks, local_world_size=ranks, job=job, restarts=restarts)


def started(compose, launch, *words):
    """A start of the ranks as rank 0 settles it; the folder is free again when it ends."""
    plan = compose.plan(*words, launch=launch)
    continue_run(plan)
    if not plan.done:
        plan.run = open_run(plan, words, ["train.py", *words])
        plan.run.unlock()
    return plan


def test_the_jobs_own_run_goes_on(compose):
    first = started(compose, of_job("7"), *BATCH)
    assert not first.again
    for launch in (of_job("7", restarts=1), of_job("7"), of_job("7", ranks=4)):  # a change of nodes is not counted
        again = started(compose, launch, *BATCH)
        assert again.run.path == first.run.path
        assert f"continuing {first.run.path}, which this job has begun" in again.notes
    starts = yaml.safe_load((first.run.path / "overrides.yaml").read_text())
    assert [start["job"] for start in starts] == ["7"] * 4


@pytest.mark.parametrize(
    ("launch", "words"),
    [(of_job("8"), BATCH), (of_job("7", restarts=1), (*BATCH, "seed=1")), (of_job("none", restarts=1), BATCH)],
    ids=["another-job", "other-words", "no-id-and-another-agent"],
)
def test_nothing_else_does(compose, launch, words):
    first = started(compose, of_job("7"), *BATCH)
    assert started(compose, launch, *words).run.path != first.run.path


def test_without_an_id_the_agent_tells(compose):
    first = started(compose, of_job("none"), *BATCH)
    assert started(compose, of_job("none", restarts=1), *BATCH).run.path == first.run.path


@pytest.mark.parametrize(("restarts", "words", "done"), [(0, (), False), (1, (), True), (0, ("resume=auto",), True)])
def test_a_finished_run(compose, restarts, words, done):
    """Ranks started again have nothing to do; a later job with the same id begins anew, unless told to go on."""
    first = started(compose, of_job("7"), *BATCH, "trainer.max_steps=4")
    first.run.summary_file.write_text(json.dumps({"steps": 4, "reason": "max_steps"}))
    again = started(compose, of_job("7", restarts), *BATCH, "trainer.max_steps=4", *words)
    assert bool(again.done) is done
    if not done:
        assert again.run.path != first.run.path


def test_auto_prefers_the_jobs_own(compose):
    mine = started(compose, of_job("7"), *BATCH)
    started(compose, of_job("8"), *BATCH)  # newer
    assert started(compose, of_job("7"), *BATCH, "resume=auto").run.path == mine.run.path


@pytest.mark.parametrize("text", ["{", "[1]", "- 5", "- {job: [1]}", "\x00"])
def test_a_strangers_starts_do_no_harm(compose, text):
    first = started(compose, of_job("7"), *BATCH)
    (first.run.path / "overrides.yaml").write_text(text)
    assert first.run.jobs() == set()


def test_a_rank_of_the_earlier_start_may_still_be_dying(compose):
    first = started(compose, of_job("7"), *BATCH).run
    first.lock()
    dying = threading.Thread(target=lambda: (time.sleep(0.5), first.unlock()))
    dying.start()
    assert started(compose, of_job("7", restarts=1), *BATCH).run.path == first.path
    dying.join()
    first.lock()
    with pytest.raises(UsageError, match="another process"):  # not the job's own: no waiting
        started(compose, of_job("8"), *BATCH, f"resume={first.path}")
    first.unlock()


@pytest.mark.parametrize(
    ("ranks", "micro", "said"),
    [
        (3, 4, "global batch 8 = 3 x 3 devices x 1 node x accumulation 1 - 1 empty"),
        (3, 2, "global batch 8 = 2 x 3 devices x 1 node x accumulation 2 - 4 empty"),
        (5, 2, "global batch 8 = 2 x 5 devices x 1 node x accumulation 1 - 2 empty"),
        (8, 4, "global batch 8 = 1 x 8 devices x 1 node x accumulation 1"),
        (1, 4, "global batch 8 = 4 x 1 device x 1 node x accumulation 2"),
        (1, 3, None),
    ],
)
def test_the_global_batch_stays_on_any_number_of_ranks(compose, ranks, micro, said):
    """Also where it does not divide; a new run is refused there."""
    words = (*BATCH, f"batch.micro_sequences={micro}")
    if said is None:
        with pytest.raises(UsageError, match="does not divide"):
            compose.plan(*words)
        return
    first = started(compose, of_job("7"), *words, "batch.micro_sequences=4")
    again = started(compose, of_job("7", ranks=ranks), *words)
    assert again.run.path == first.run.path
    assert str(batch_plan(again.plain)) == said
    typed = compose.plan(f"resume={first.run.path}", f"trainer.devices={ranks}", f"batch.micro_sequences={micro}")
    assert str(batch_plan(typed.plain)) == said


def test_auto_that_finds_no_run_is_a_new_run(compose):
    plan = compose.plan(*BATCH, "batch.micro_sequences=3", "resume=auto")
    with pytest.raises(UsageError, match="does not divide"):
        continue_run(plan)
