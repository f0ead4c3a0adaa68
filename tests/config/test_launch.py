import os
from dataclasses import replace

import pytest

from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch, job_of, plain_environment, read_launch

SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}


def launch_of(**environ):
    return read_launch(environ)[0]


def test_torchrun_with_a_static_rendezvous():
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
    }
    assert read_launch(environ) == (Launch("torchrun", 3, 4, 1, 2, 2, "none"), None)
    assert environ["RANK"] == "3"
    assert read_launch({**environ, "TORCHELASTIC_RESTART_COUNT": "2"})[0].restarts == 2


def test_what_starts_of_one_torchrun_job_have_in_common():
    """Its id; where it was given none the agent, which is the parent of every worker it starts."""
    assert job_of(Launch("torchrun", job="7")) == job_of(Launch("torchrun", rank=1, restarts=2, job="7")) == "7"
    nameless = Launch("torchrun", job="none")
    assert job_of(nameless) == job_of(replace(nameless, restarts=1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(job_of(nameless)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000).decode() != job_of(nameless)
    assert job_of(Launch("slurm")) is None
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "3", "WORLD_SIZE": "8"},
        {"WORLD_SIZE": "", "RANK": ""},
        {"TORCHELASTIC_RUN_ID": "old", "LOCAL_RANK": "0"},
    ],
)
def test_leftovers_are_removed_with_one_line(environ):
    launch, warning = read_launch(environ)
    assert launch == Launch()
    assert warning.count("\n") == 0
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(environ)


def test_nothing_set():
    assert read_launch({}) == (Launch(), None)


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"},
        {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"},
        {"SLURM_NTASKS": "1", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"},
    ],
    ids=["interactive", "shell-in-a-step", "batch-script", "fewer-tasks", "requeue"],
)
def test_single_processes_inside_slurm(more):
    assert launch_of(**{**SLURM, **more}) == Launch()


def test_srun_tasks():
    environ = {**SLURM, "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NNODES": "2"}
    assert launch_of(**environ) == Launch("slurm", 2, 4, 0, 2, 2)


def test_child_of_lightning():
    launch = launch_of(LMFORGE_RUN="runs/a/b", LOCAL_RANK="1", WORLD_SIZE="2")
    assert (launch.kind, launch.rank, launch.world_size) == ("child", 1, 2)
    assert launch_of(LMFORGE_RUN="runs/a/b") == Launch()


@pytest.mark.parametrize(("kind", "plain"), [("none", True), ("child", True), ("torchrun", False), ("slurm", False)])
def test_only_outer_launchers_bring_an_environment_of_their_own(kind, plain):
    assert plain_environment(Launch(kind)) is plain


def test_nonsense_from_a_launcher():
    with pytest.raises(UsageError, match="RANK=x"):
        launch_of(TORCHELASTIC_RUN_ID="1", RANK="x", WORLD_SIZE="2")
    with pytest.raises(UsageError, match="rank 2 of a world of 2"):
        launch_of(TORCHELASTIC_RUN_ID="1", RANK="2", WORLD_SIZE="2")
    with pytest.raises(UsageError, match="each node must hold the same number"):
        launch_of(**{**SLURM, "SLURM_NTASKS": "3", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"})
