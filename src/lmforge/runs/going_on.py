"""Which run a start goes on with, and claiming its folder."""

from __future__ import annotations

from collections.abc import Sequence

from lmforge.config.batch import batch_plan
from lmforge.config.launch import job_of
from lmforge.config.machine_checks import check_weights
from lmforge.config.plain import Plain
from lmforge.runs.find import find_auto, find_begun
from lmforge.runs.folder import RunFolder
from lmforge.runs.plan import Plan, meet_stored, show

DYING_SECONDS = 120.0  # what a rank of the job's earlier start may still hold the folder; NFS frees a dead one's lock


def continue_run(plan: Plan) -> None:
    """Finds the run of resume=auto, or the one that an earlier start of the same job has begun, and says so when the
    run to continue has nothing left to do. Rank 0 only."""
    asked = plan.plain["resume"]
    if asked in (None, "auto"):
        plan.run, finished = _find(plan)
        if plan.run is not None:
            meet_stored(plan, plan.run)
        elif finished is not None:
            plan.done = _finished(finished, plan.plain)
    elif plan.run is not None and plan.run.finished(plan.plain):
        plan.done = _finished(plan.run, plan.plain)
    plan.plain["resume"] = str(plan.run.path) if plan.run else None
    if plan.run:
        plan.notes.append(f"continuing {plan.run.path}{', which this job has begun' if plan.again else ''}")
    elif asked == "auto" and not plan.done:
        _check_new(plan)
    plan.notes += [f"{key} {show(old)} -> {show(new)}" for key, (old, new) in plan.changed.items()]


def _find(plan: Plan) -> tuple[RunFolder | None, RunFolder | None]:
    """(the run to go on with, the finished one that leaves nothing to do). The job's own run comes first; one that is
    finished belongs to an earlier job of the same id, unless this is known to be another start of the same."""
    job, any_precision = job_of(plan.launch), "precision" in plan.kept
    if job and (begun := find_begun(plan.plain, job, any_precision)):
        plan.again = not begun.finished(plan.plain)
        if plan.again:
            return begun, None
        if plan.launch.restarts:
            return None, begun
    return find_auto(plan.plain, any_precision) if plan.plain["resume"] == "auto" else (None, None)


def _check_new(plan: Plan) -> None:
    """What could wait while the run might have been one that goes on. Under an outer launcher all checks follow."""
    if not plan.launch.external:
        batch_plan(plan.plain)
        check_weights(plan.plain)
    plan.notes.append("resume=auto: no unfinished run like this one; starting a new run")


def _finished(run: RunFolder, plain: Plain) -> str:
    larger = " and ".join(f"a larger {key}" for key in run.ended_by(plain))
    return f"{run.path} is finished; {larger} goes on"


def open_run(plan: Plan, words: Sequence[str], argv: Sequence[str]) -> RunFolder:
    """Makes the new run folder, or claims the one to continue and records this start in it. Of its own job's earlier
    start it waits for the end."""
    job = job_of(plan.launch)
    if plan.run is None:
        run = RunFolder.create(plan.plain, words, argv, job=job)
        run.lock()
        return run
    plan.run.lock(DYING_SECONDS if plan.again else 0.0)
    plan.run.write_start(words, argv, plan.changed, job)
    if differs := plan.run.write_resumed():
        plan.notes.append(f"since the run began: {', '.join(differs)}")
    plan.run.write_config(plan.plain)
    return plan.run
