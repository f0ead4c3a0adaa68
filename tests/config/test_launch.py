import os
from dataclasses import replace

import pytest

from lmforge.config.connection import first_host, meeting_point, typed_by_hand
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
        {"MASTER_ADDR": "host", "MASTER_PORT": "29500"},
    ],
)
def test_leftovers_are_removed_with_one_line(environ):
    launch, warning = read_launch(environ)
    assert launch == Launch()
    assert warning.count("\n") == 0
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(environ)
    assert "type strategy.init_method=env:// or tcp://HOST:PORT" in warning


def test_ranks_started_by_hand_are_meant_when_the_command_says_where_they_meet():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host"}
    assert read_launch(environ, by_hand=True) == (Launch("hand", 3, 4, 3, 4, 1), None)
    assert read_launch(environ) == (Launch("hand", 3, 4, 3, 4, 1), None)  # what the job reads later
    assert environ["MASTER_ADDR"] == "host"
    each = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    launch = read_launch(each, by_hand=True)[0]
    assert launch == Launch("hand", 3, 4, 1, 2, 2)
    assert launch.external
    assert launch.name == "RANK and WORLD_SIZE"


def test_by_hand_alone_is_one_process():
    assert read_launch({}, by_hand=True) == (Launch(), None)
    assert read_launch({"WORLD_SIZE": "", "RANK": ""}, by_hand=True)[0] == Launch()
    child = {"LMFORGE_RUN": "a/b", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "RANK": "1"}
    assert read_launch(child, by_hand=True)[0].kind == "child"
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert read_launch(torchrun, by_hand=True)[0].kind == "torchrun"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set; ranks started by hand need both"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE gave rank 2 of a world of 2 processes"),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "each node must hold the same number"),
    ],
)
def test_nonsense_by_hand(environ, said):
    with pytest.raises(UsageError, match=said):
        read_launch(environ, by_hand=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["strategy=ddp", "strategy.init_method=tcp://a:1"], True),
        (["+strategy.init_method=env://"], True),
        (["strategy=ddp", "name=strategy.init_method"], False),
    ],
)
def test_a_command_line_says_where_ranks_meet(words, expected):
    assert typed_by_hand(words) is expected


TCP, ENV = "tcp://[::1]:29511", "env://"
MASTER = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
NODES = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "1",
    "SLURM_NODELIST": "n[8-9]",
    "SLURM_STEP_NODELIST": "n[02,7],o",
}


@pytest.mark.parametrize(
    ("init_method", "kind", "environ", "point"),
    [
        (TCP, "torchrun", MASTER, ("::1", 29511)),
        (ENV, "torchrun", MASTER, ("host", 29500)),
        (ENV, "hand", MASTER, ("host", 29500)),
        (ENV, "slurm", NODES, ("n02", 19668)),
        (ENV, "slurm", NODES | MASTER, ("host", 29500)),
        (ENV, "slurm", {}, ("127.0.0.1", 15000)),
    ],
)
def test_where_ranks_meet(init_method, kind, environ, point):
    assert meeting_point(init_method, Launch(kind), environ) == point


def test_nowhere_to_meet():
    with pytest.raises(UsageError, match="RANK and WORLD_SIZE set no MASTER_PORT, so ranks do not know where to meet"):
        meeting_point(ENV, Launch("hand"), {"MASTER_ADDR": "host", "MASTER_PORT": ""})
    with pytest.raises(UsageError, match="MASTER_PORT=http: must be a port from 1 to 65535"):
        meeting_point(ENV, Launch("hand"), MASTER | {"MASTER_PORT": "http"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node01", "node01"), ("node[01-03,07],other", "node01"), ("a,b", "a"), ("r[1-2]n[3-4]", "r1n3"), ("x[5]", "x5")],
)
def test_first_of_slurms_machines(nodes, first):
    assert first_host(nodes) == first


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
    environ |= {"RANK": "7", "MASTER_ADDR": "host"}
    assert read_launch(environ, by_hand=True)[0] == Launch("slurm", 2, 4, 0, 2, 2)
    assert environ["MASTER_ADDR"] == "host"


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
