"""Ranks started by hand, which meet where the command says, or end in time and say why not."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from commands import Outcome, Running, start_command
from lmforge.runs.rows import read_rows
from ranks import free_port

WORDS = ("strategy=ddp", "trainer.max_steps=3", "trainer.val_every_n_steps=3", "precision=64-true")


def first_speaks(rank: int) -> None:
    """What Lightning read at its import, which these forked commands have behind them."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank


def start(program, rank: int, *words: str, **environment: str) -> Running:
    """A process whose environment says that it is this rank."""
    environment |= {"LMFORGE_CACHE": str(program.cache), "GLOO_SOCKET_IFNAME": "lo"}
    line = program.tiny(*WORDS, *words)
    program.started.append(start_command(line, program.folder, partial(first_speaks, rank), **environment))
    return program.started[-1]


def start_rank(program, rank: int, world: int, *words: str, **environment: str) -> Running:
    return start(program, rank, *words, RANK=str(rank), WORLD_SIZE=str(world), **environment)


def train(program, *words: str, **environment: str) -> Sequence[Outcome]:
    ranks = [start_rank(program, rank, 2, *words, **environment) for rank in (0, 1)]
    return [rank.finish() for rank in ranks]


def digits(run: Path) -> list[tuple[float, ...]]:
    rows = read_rows(run / "metrics.csv")
    return [tuple(float(row[name]) for name in ("step", "train/loss", "train/grad_norm")) for row in rows]


def test_ranks_by_hand_train_as_those_of_torchrun(program) -> None:
    """One run folder, equal to the last digit; another seed would be noticed."""
    point = f"tcp://127.0.0.1:{free_port()}"
    hand = train(program, "name=hand", f"strategy.init_method={point}")
    assert [rank.code for rank in hand] == [0, 0], hand[0].output + hand[1].output
    assert f" over gloo ({point}), 64-true: weights float64, compute float64" in hand[0].output
    assert "run folder" not in hand[1].output
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outer = train(program, "name=outer", **torchrun, LOCAL_RANK="0")
    assert [rank.code for rank in outer] == [0, 0], outer[0].output
    assert " over gloo (env://), 64-true" in outer[0].output
    assert digits(program.run("hand")) == digits(program.run("outer"))
    other = train(program, "name=other", "seed=1", f"strategy.init_method={point}")
    assert [rank.code for rank in other] == [0, 0], other[0].output
    assert digits(program.run("other")) != digits(program.run("hand"))


def test_tasks_of_srun_find_each_other(program) -> None:
    """By what Slurm says of them: it sets no RANK, no WORLD_SIZE and no MASTER_ADDR."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_NNODES": "1", "SLURM_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    tasks = [start(program, rank, **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)]
    ends = [task.finish() for task in tasks]
    assert [end.code for end in ends] == [0, 0], ends[0].output + ends[1].output
    assert digits(program.run())[-1][0] == 3.0


def test_a_rank_that_is_missing(program) -> None:
    """Named within the time-out, with code 1 and no run folder."""
    began = time.monotonic()
    point = f"strategy.init_method=tcp://127.0.0.1:{free_port()}"
    alone = start_rank(program, 0, 2, point, "strategy.timeout_seconds=3").finish(60)
    assert alone.code == 1
    assert alone.output.startswith(f"NotConnected: rank 1 of 2 did not come to {point[27:]} within 3 s\n")
    assert time.monotonic() - began < 30
    assert program.runs() == []


def test_rank_0_is_missing(program) -> None:
    point = f"127.0.0.1:{free_port()}"
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": point.partition(":")[2]}
    words = ("strategy.init_method=env://", "strategy.timeout_seconds=3")
    alone = start_rank(program, 1, 2, *words, **environment).finish(60)
    assert alone.code == 1
    assert f"NotConnected: rank 1 of 2 did not reach rank 0 at {point} within 3 s: Connection refused" in alone.output


def test_a_wrong_word_of_one_rank_is_said_by_that_rank(program) -> None:
    wrong = start_rank(program, 1, 2, "strategy.init_method=tcp://127.0.0.1:1", "strategy.timeout_second=3").finish(60)
    assert wrong.code == 2
    assert "rank 1: python train.py: 1 problem" in wrong.output
    assert "did you mean strategy.timeout_seconds?" in wrong.output


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("strategy.process_group_backend=mpi", "was built without MPI"),
        ("strategy.process_group_backend=nccl", "carries GPU tensors only"),
        ("strategy.init_method=tcp:/host:1", "did you mean tcp://host:1?"),
    ],
)
def test_what_cannot_connect_starts_nothing(program, word, said) -> None:
    refused = program.train("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", word)
    assert refused.code == 2
    assert word in refused.output
    assert said in refused.output
    assert not (program.folder / "runs").exists()


def test_a_job_of_one_process_has_no_ranks(program) -> None:
    line = "python train.py -m seed=1,2 strategy.init_method=tcp://127.0.0.1:1"
    sweep = start_command(line.split(), program.folder, RANK="0", WORLD_SIZE="2").finish(60)
    assert sweep.code == 2
    assert "a sweep starts its jobs itself; run it without RANK and WORLD_SIZE" in sweep.output
