"""torchrun starts ranks again, fewer or more of them, and the run goes on: same folder, same batches, same numbers."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from changes import note_samples, samples_of, slow_steps

from agents import Agent, rendezvous, wait_for
from lmforge.runs.rows import read_rows

STEPS = 24
WORDS = ("precision=64-true", f"trainer.max_steps={STEPS}", "callbacks.checkpoint.every_n_steps=4")


@pytest.fixture
def whole(program) -> list[dict[str, str]]:
    """The log of a process that trains alone and is left in peace."""
    outcome = program.train(*WORDS, "name=whole")
    assert outcome.code == 0, outcome.output
    return read_rows(program.run("whole") / "metrics.csv")


def node(program, share, step_seconds: float, *typed: str, **more) -> Agent:
    words = program.tiny(*WORDS, *typed)
    changes = (partial(slow_steps, step_seconds), partial(note_samples, program.folder))
    os.environ["LMFORGE_CACHE"] = str(program.cache)
    return Agent(words, program.folder, changes, max_restarts=3, **share, **more)


def logged(program) -> int:
    return len(read_rows(program.run() / "metrics.csv")) if program.runs() else 0


def assert_as_whole(program, whole: list[dict[str, str]]) -> None:
    """One folder, each step once, no sample lost or trained on twice, and the numbers of the run left in peace."""
    rows = read_rows(program.run() / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert samples_of(program.folder) == {u: list(range(8 * u, 8 * u + 8)) for u in range(STEPS)}
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        ours, theirs = ([float(row[name] or 0) for row in log] for log in (rows, whole))
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_worker_that_is_killed(program, whole) -> None:
    agent = node(program, rendezvous(), 0.05, min_nodes=1, max_nodes=1, nproc_per_node=2)
    wait_for(lambda: logged(program) >= 7, [agent])
    os.kill(agent.workers()[1], signal.SIGKILL)
    assert agent.finish() == 0, agent.output
    assert re.search(r"rank 1 \(process \d+\) (was killed by SIGKILL|is gone without a word) after step", agent.output)
    assert f"continuing {program.run().relative_to(program.folder)}, which this job has begun" in agent.output
    (resumed,) = re.findall(r"^resuming    step-(\d+) of", agent.output, flags=re.MULTILINE)  # at the first attempt
    assert 4 <= int(resumed) < STEPS
    assert_as_whole(program, whole)


@pytest.mark.slow
def test_a_node_that_is_lost_and_replaced(program, whole) -> None:
    """Two ranks, one, two again; the store lies with the node that stays."""
    share = rendezvous() | {"min_nodes": 1, "max_nodes": 2, "nproc_per_node": 1}
    agents = [node(program, share, 0.4, host=True), node(program, share, 0.4, host=False)]
    spread = "global batch 8 = {} x 1 device x {} node"
    wait_for(lambda: logged(program) >= 7, agents)
    agents[1].kill_node()
    wait_for(lambda: spread.format(8, 1) in said(agents), agents)
    wait_for(lambda: logged(program) >= 12, agents)
    agents.append(node(program, share, 0.4, host=False))
    wait_for(lambda: said(agents).count(spread.format(4, 2)) == 2, agents)
    assert [agents[0].finish(), agents[2].finish()] == [0, 0], said(agents)
    assert_as_whole(program, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, "85\n"), (signal.SIGTERM, "143\n")])
def test_one_worker_that_is_told_ends_the_job_with_0(program, whole, number, code) -> None:
    """torchrun does not start it again; the folder holds the code, and the same command goes on in it."""
    alone = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}
    agent = node(program, rendezvous(), 0.05, **alone)
    wait_for(lambda: logged(program) >= 7, [agent])
    os.kill(agent.workers()[1], number)
    assert agent.finish() == 0, agent.output
    assert agent.output.count("and saved; go on with") == 1
    assert (program.run() / "exit_code").read_text() == code
    again = node(program, rendezvous(), 0.0, "resume=auto", **alone)
    assert again.finish() == 0, again.output
    assert_as_whole(program, whole)


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_agent(program) -> None:
    agent = node(program, rendezvous(), 0.05, "trainer.max_steps=100000", min_nodes=1, max_nodes=1, nproc_per_node=2)
    wait_for(lambda: logged(program) >= 3, [agent])
    workers = agent.workers()
    assert len(workers) == 2
    os.kill(agent.process.pid, signal.SIGKILL)
    agent.process.join()
    try:
        deadline = time.monotonic() + 40
        while any(map(lives, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(lives, workers))
    finally:
        for worker in filter(lives, workers):
            os.kill(worker, signal.SIGKILL)


def lives(pid: int) -> bool:
    """And is no corpse that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def said(agents: list[Agent]) -> str:
    return "".join(agent.output for agent in agents)
