"""This project as a contender: train.py's own way from words to a fit, with one more callback that takes the turns."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig

from benchmarks.contest import Turn
from lmforge.config.batch import batch_plan
from lmforge.config.compose import Composer, config_folder
from lmforge.config.launch import Launch
from lmforge.config.parse import Tree, read_words
from lmforge.config.plain import to_config
from lmforge.data.windows import Window
from lmforge.runs.folder import RunFolder
from lmforge.runs.plan import plan_train
from lmforge.tasks.update import UpdateTask
from lmforge.training import assemble
from lmforge.training.logbook import Logbook

ROOT = Path(__file__).resolve().parents[1]
STEPS = 100_000  # more than any contest takes


def config(*words: str) -> dict[str, Any]:
    """The checked config of `python train.py WORDS`."""
    tree = Tree(config_folder("train", ROOT / "train.py"))
    problems: list[str] = []
    parsed = read_words(["trainer.threads=1", *words], tree, False, problems)
    if problems:
        raise ValueError(problems)
    return plan_train(Composer("train", tree), parsed, [], Launch(), problems).plain


class Turns(pl.Callback):
    """Hands the turn back after every so many updates, behind all other callbacks."""

    def __init__(self, turn: Turn, every: int):
        self.turn, self.every = turn, every

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.turn()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step % self.every == 0:
            book = next(c for c in trainer.callbacks if isinstance(c, Logbook))  # type: ignore[attr-defined]
            loader = trainer.datamodule.train_loader  # type: ignore[attr-defined]
            self.turn(loss=book.train_loss, waited=loader.wait_seconds, built=loader.build_seconds)


def fit(turn: Turn, words: list[str], every: int = 1) -> None:
    """`python train.py WORDS` whose every `every` updates are one turn."""
    plain = config(f"trainer.max_steps={STEPS}", f"trainer.log_every_n_steps={every}", *words)
    run(plain, [Turns(turn, every)])


def run(plain: dict[str, Any], also: list[pl.Callback]) -> dict[str, Any]:
    """A whole run with `also` behind its own callbacks; its summary."""
    sys.path.insert(0, str(ROOT))
    from train import train

    make = assemble.make_trainer

    def watched(cfg: DictConfig, folder: Path, callbacks: list[pl.Callback], *args: Any, **options: Any) -> pl.Trainer:
        return make(cfg, folder, [*callbacks, *also], *args, **options)

    with patch.object(assemble, "make_trainer", watched):
        return dict(train(to_config(plain), RunFolder.create(plain)))


def parts(words: list[str]) -> tuple[DictConfig, UpdateTask, Iterator[Window]]:
    """The same network, optimizers and windows without the trainer: what a bare loop needs."""
    cfg = to_config(config(f"trainer.max_steps={STEPS}", *words))
    assemble.keep_memory()
    torch.set_num_threads(1)
    data, plan = assemble.make_data(cfg), batch_plan(cfg)
    data.connect(plan, cfg.seed, STEPS * plan.sequences)
    task = assemble.make_task(cfg, data, STEPS, initialise=True)
    task.plan.apply(task.network, assemble.make_precision(cfg, "cpu"), torch.device("cpu"), task.seed)
    return cfg, task, iter(data.train_dataloader())


def bare_loop(turn: Turn, words: list[str], every: int = 1) -> None:
    """Our network and optimizers in the shortest loop that trains: forward, loss, backward, clip, update."""
    from lmforge.tasks.cross_entropy import summed_cross_entropy
    from lmforge.tasks.update import set_learning_rate

    _, task, stream = parts(words)
    network = task.network.train()
    windows = [next(stream) for _ in range(200)]
    optimizers = task.make_optimizers(network=network)
    parameters = list(network.parameters())
    turn()
    step = 0
    while True:
        losses = []
        for _ in range(every):
            step += 1
            window = windows[step % len(windows)]
            set_learning_rate(optimizers, task.schedule(step, STEPS))
            for batch in window["micro_batches"]:
                logits = network(batch["input_ids"], batch["doc_ids"], batch["positions"])
                loss = summed_cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / window["targets"]
                loss.backward()
                losses.append(loss.detach())
            torch.nn.utils.clip_grad_norm_(parameters, task.clip_norm or float("inf"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        turn(loss=float(torch.stack(losses).mean()))
