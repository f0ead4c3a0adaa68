"""CPU time to the loss that the plain recipe ends at: our default recipe on the same tokens and about the same size."""

import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks import contest, corpus, nanogpt, product
from benchmarks.contest import Turn
from benchmarks.report import Row, verdict
from benchmarks.rows import training
from benchmarks.settings import Settings
from lmforge.data.module import TokenWindows

MOST = 0.4
SHARES = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # of the plain recipe's updates, tried until one gets there
WARMUP, FLOOR = 100, 0.1  # updates, share of the peak rate at the end


def words(shards: Path, size: dict[str, Any]) -> list[str]:
    """The default recipe and architecture, in the size of the plain one."""
    return f"""
    data=tokens data.path={shards} model.vocab_size={corpus.VOCABULARY} model.context={size["context"]}
    model.n_layer={size["layers"]} model.n_head={size["heads"]} model.d_model={size["width"]} model.tied=true
    batch.tokens=null batch.sequences={size["batch"]} batch.micro_sequences={size["batch"]}
    callbacks.samples=null callbacks.checkpoint.monitor=val/loss callbacks.checkpoint.every_n_steps=1000000
    """.split()


def plain(turn: Turn, shards: Path, shape: dict[str, int], batch: int, steps: int) -> None:
    """nanoGPT's recipe: AdamW, a short warm-up, a cosine down to a tenth."""
    torch.set_num_threads(1)
    data = TokenWindows(shards, context=shape["context"])
    network = nanogpt.PlainGPT(**shape)
    optimizer = nanogpt.make_adamw(network, nanogpt.RATE)
    tokens = data.train.shards.tokens(0, data.train.shards.n_tokens)
    turn()
    began = time.process_time()
    for step in range(steps):
        down = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * max(0, step - WARMUP) / max(1, steps - WARMUP)))
        for group in optimizer.param_groups:
            group["lr"] = nanogpt.RATE * min(step / WARMUP, down)
        ids, labels = nanogpt.get_batch(tokens, batch, shape["context"])
        nanogpt.plain_loss(network(ids), labels).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    turn(seconds=time.process_time() - began, loss=_validate(network, data))


@torch.no_grad()
def _validate(network: nanogpt.PlainGPT, data: TokenWindows) -> float:
    import numpy as np

    total, count = 0.0, 0
    for start in range(0, len(rows := data.rows("val")), 64):
        batch = rows.batch(np.arange(start, min(start + 64, len(rows))))
        targets = int((batch["labels"] != nanogpt.IGNORED).sum())
        total += float(nanogpt.plain_loss(network(batch["input_ids"]), batch["labels"])) * targets
        count += targets
    return total / count


class Whole(pl.Callback):
    """CPU time from the first update to the last, without the validation."""

    def __init__(self, turn: Turn):
        self.turn = turn

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.turn()
            self.began = time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seconds = time.process_time() - self.began


def ours(turn: Turn, words: list[str]) -> None:
    whole = Whole(turn)
    summary = product.run(product.config(*words), [whole])
    turn(seconds=whole.seconds, loss=summary["val/loss"])


def rows(settings: Settings) -> list[Row]:
    size, folder = training.SIZES["tiny"], settings.folder / "recipe"
    shards = corpus.byte_shards(settings.folder / "bytes", settings.pick(4.0, 0.3))
    steps = settings.pick(500, 20)
    options = {"shards": shards, "shape": training.shape(size), "batch": size["batch"], "steps": steps}
    theirs = contest.compete({"plain": (plain, options)}, 1, 0, folder)["plain"].said[0]
    tried: dict[str, dict[str, float]] = {}
    for share in settings.pick(SHARES, SHARES[-1:]):
        mine = [*words(shards, size), f"trainer.max_steps={round(share * steps)}"]
        said = contest.compete({f"ours {share}": (ours, {"words": mine})}, 1, 0, folder)[f"ours {share}"].said[0]
        tried[str(share)] = said
        if said["loss"] <= theirs["loss"]:
            break
    ratio, reached = said["seconds"] / theirs["seconds"], said["loss"] <= theirs["loss"]
    return [
        Row(
            "CPU time to the plain recipe's loss",
            f"<= {MOST}x",
            f"{ratio:.2f}x with {share:.0%} of the updates: val loss {said['loss']:.3f} after {said['seconds']:.0f} s, "
            f"plain {theirs['loss']:.3f} after {theirs['seconds']:.0f} s",
            verdict(reached and ratio <= MOST),
            {"plain": theirs, "tried": tried, "steps": steps, "ratio": ratio},
        )
    ]
