"""Runs whose ranks train apart: what they compute, when they wait, and how they go on."""

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from jobs import digits, last_checkpoint, stop_after, train_on, weights

from lmforge.config.batch import batch_plan
from lmforge.config.plain import to_config
from lmforge.data.order import SampleOrder
from lmforge.data.windows import Windows
from lmforge.parallel.local_sgd import Rounds
from lmforge.parallel.plan import initialise
from lmforge.runs.folder import list_checkpoints
from lmforge.tasks.update import UpdateTask, set_learning_rate
from lmforge.training import assemble, resume
from lmforge.training.rank_state import RankState
from tiny import compose, metrics, new_run

EVERY = 4
slow = partial(pytest.param, marks=pytest.mark.slow)
APART, DDP = f"strategy=local_sgd strategy.sync_every={EVERY}", "strategy=ddp"
WORDS = (
    "trainer.devices=2",
    "batch.sequences=12",
    "trainer.max_steps=8",
    "trainer.log_every_n_steps=4",
    "callbacks.checkpoint.every_n_steps=4",
    "precision=64-true",
)


def settings(shards: Path, strategy: str = APART, *words: str) -> dict[str, Any]:
    return compose(shards, *WORDS, *strategy.split(), *words)


def trained(
    shards: Path, strategy: str = APART, *words: str, changes: tuple[jobs.Change, ...] = ()
) -> tuple[Path, list[jobs.Facts]]:
    plain = settings(shards, strategy, *words)
    folder = new_run(plain).path
    return folder, train_on(2, plain, folder, *changes)


def test_meeting_at_every_step_is_ddp(shards) -> None:
    """Gradients are averaged: to average what AdamW makes of them would be something else."""
    apart, _ = trained(shards, "strategy=local_sgd strategy.sync_every=1")
    together, _ = trained(shards, DDP)
    assert digits(apart) == digits(together)


def by_hand(shards: Path) -> dict[str, torch.Tensor]:
    """The weights after a loop over two networks in this process, each with an AdamW of its own, and torch's Nesterov
    momentum between them."""
    cfg = to_config(settings(shards))
    data, plan, strategy = assemble.make_data(cfg), batch_plan(cfg), cfg.strategy
    order, steps = SampleOrder(len(data.train), cfg.seed), cfg.trainer.max_steps
    windows = [Windows(data.train, order, plan, rank, steps * plan.sequences) for rank in range(2)]
    nets = [network(cfg, data.vocab_size) for _ in range(3)]
    outer = torch.optim.SGD(nets[2].parameters(), strategy.outer_lr, strategy.outer_momentum, nesterov=True)
    inner = [assemble.build(cfg.optimizer, network=net) for net in nets[:2]]
    for step in range(steps):
        for net, optimizers, window in zip(nets, inner, windows, strict=False):
            set_learning_rate(optimizers, 1.0)
            own_step(net, optimizers, window[step], cfg.trainer.gradient_clip_val)
        if (step + 1) % EVERY == 0:
            for p, first, second in zip(*(net.parameters() for net in (nets[2], *nets[:2])), strict=True):
                p.grad = p.detach() - (first.detach() + second.detach()) / 2
            outer.step()
            for net in nets[:2]:
                net.load_state_dict(nets[2].state_dict())
    return {name: p.detach() for name, p in nets[2].named_parameters()}


def network(cfg: Any, vocabulary: int) -> torch.nn.Module:
    net = assemble.make_network(cfg, vocabulary).double().to_empty(device="cpu")
    initialise(net, cfg.seed)
    return net


def own_step(net: torch.nn.Module, optimizers: list[Any], window: Any, most: float) -> None:
    net.zero_grad()
    for batch in window["micro_batches"]:
        logits = net(batch["input_ids"], batch["doc_ids"], batch["positions"]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        (loss / window["targets"]).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), most)
    for optimizer in optimizers:
        optimizer.step()


def met_with_averages() -> None:
    """A mutation: the outer step has no momentum."""
    make = Rounds.__init__
    Rounds.__init__ = lambda self, network, every, lr, momentum: make(self, network, every, lr, 0.0)  # type: ignore[method-assign]


@pytest.mark.parametrize(("changes", "same"), [((), True), ((met_with_averages,), False)])
def test_it_is_the_loop_written_by_hand(shards, changes, same) -> None:
    folder, facts = trained(shards, changes=changes)
    expected = by_hand(shards)
    largest = max(float((value - expected[name]).abs().max()) for name, value in weights(folder).items())
    assert (largest < 1e-9) == same
    sent, plain = (facts[0]["summary"][f"comm_bytes_{name}"] for name in ("per_step", "uncompressed"))
    assert sent == plain / EVERY
    assert facts[0]["summary"]["comm_calls"] == 2


def test_counts_are_those_of_all_ranks(shards) -> None:
    apart, _ = trained(shards)
    together, _ = trained(shards, DDP)
    assert metrics(apart, "train/tokens") == metrics(together, "train/tokens")


def slow_on(rank: int, seconds: float) -> None:
    """One rank takes longer for each step; each notes when it has done one, before any meeting."""
    seed, count = UpdateTask._seed, UpdateTask._count_step

    def waited(task: UpdateTask, step: int) -> None:
        seed(task, step)
        if task.global_rank == rank:
            time.sleep(seconds)

    def noted(task: UpdateTask) -> None:
        count(task)
        with Path(f"done-{task.global_rank}").open("a") as file:
            print(time.monotonic(), file=file)

    UpdateTask._seed, UpdateTask._count_step = waited, noted  # type: ignore[method-assign]


@pytest.mark.parametrize(("strategy", "waits"), [(APART, False), (DDP, True)])
def test_the_others_do_not_wait_for_a_slow_rank_between_two_meetings(shards, strategy, waits) -> None:
    """Clocks of one machine: the last step of a round is done before the slow rank has done half of its own."""
    trained(shards, strategy, changes=(partial(slow_on, 1, 0.3),))
    quick, slow = ([float(line) for line in Path(f"done-{rank}").read_text().split()] for rank in range(2))
    assert len(quick) == len(slow) == 8
    for start in (0, EVERY):
        assert (quick[start + EVERY - 1] > slow[start + EVERY // 2]) == waits
    assert quick[EVERY] > slow[EVERY - 1]  # where they meet, it waits


def test_a_signal_is_heard_where_they_meet(shards) -> None:
    folder, facts = trained(shards, changes=(partial(jobs.signal_at, 1, 2),))
    assert [(rank["stopped"], rank["step"]) for rank in facts] == [("Terminated", EVERY)] * 2
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000004"]


def test_a_nan_is_skipped_where_it_is_and_counted_by_all(shards) -> None:
    folder, facts = trained(shards, changes=(partial(jobs.nan_at, 1, 2),))
    assert [(rank["step"], rank["skipped"], rank["finite"]) for rank in facts] == [(8, 1, True)] * 2
    assert all(math.isfinite(loss) for _, loss in metrics(folder, "train/loss"))


def test_too_many_on_one_rank_end_all_where_they_meet(shards) -> None:
    changes = tuple(partial(jobs.nan_at, 1, step) for step in range(1, 9))
    _, facts = trained(shards, APART, "trainer.nonfinite_patience=3", changes=changes)
    assert [rank["stopped"] for rank in facts] == ["NonFinite"] * 2
    assert {rank["step"] for rank in facts if "step" in rank} <= {EVERY}


def forget_own_optimizer() -> None:
    """A mutation: every rank goes on with the optimizer state of rank 0."""
    RankState.optimizer = lambda self, parallel: self.checkpoint.reader("optimizer")  # type: ignore[method-assign]


def forget_momentum() -> None:
    RankState._remember = lambda *args: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("changes", "same"), [((), True), ((forget_own_optimizer,), False), slow((forget_momentum,), False)]
)
def test_it_goes_on_with_the_same_digits(shards, changes, same) -> None:
    plain = settings(shards, APART, "model.dropout=0.1")
    whole, parts = new_run(plain).path, new_run(plain).path
    train_on(2, plain, whole)
    train_on(2, plain, parts, stop_after(3))
    assert last_checkpoint(parts).step == EVERY
    train_on(2, plain, parts, *changes)
    assert (digits(parts) == digits(whole)) == same


def note_what_is_said() -> None:
    resume.report = lambda line: Path("said").write_text(line)


@pytest.mark.parametrize(("world", "strategy"), [(3, APART), slow(2, DDP)])
def test_others_go_on_with_the_optimizer_state_of_the_first_rank(shards, world, strategy) -> None:
    plain = settings(shards)
    folder = new_run(plain).path
    train_on(2, plain, folder, stop_after(3))
    again = settings(shards, strategy, f"trainer.devices={world}")
    facts = train_on(world, again, folder, note_what_is_said)
    assert [rank["step"] for rank in facts] == [8] * world
    assert "all go on with the optimizer state of rank 0" in Path("said").read_text()
