"""What the trainer adds to our own network in a bare loop."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import contest, corpus, product
from benchmarks.contest import Turn
from benchmarks.report import Row, verdict
from benchmarks.rows import training
from benchmarks.settings import Settings

STEP = 70e-3  # seconds, of the step that the goal speaks of
MOST_SHARE, MOST_SECONDS = 0.01, 0.35e-3


class Noop(nn.Module):
    """A network of one vector: what is left is the machinery."""

    block_class = nn.ModuleDict

    def __init__(self, context: int):
        super().__init__()
        self.context = context
        self.table = nn.Parameter(torch.empty(corpus.VOCABULARY))

    def forward(self, ids: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        return self.table.expand(*ids.shape, -1)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.zeros(shape)

    def flops_per_token(self, time: int) -> float:
        return 0.0


def on_noop(turn: Turn, contender: Any, words: list[str], every: int) -> None:
    """A contender with the network of one vector in place of its own."""
    with patch("lmforge.training.assemble.make_network", lambda cfg, size: Noop(cfg.model.context).to("meta")):
        contender(turn, words, every)


def rows(settings: Settings) -> list[Row]:
    shards = corpus.byte_shards(settings.folder / "bytes", settings.pick(4.0, 0.3))
    return [_noop(shards, settings), _real(shards, settings)]


def _noop(shards: Any, settings: Settings) -> Row:
    size = {**training.SIZES["tiny"], "context": 8, "batch": 1}
    words = [*training.words(shards, size), "precision=32-true", "model.context=8"]
    every = settings.pick(400, 50)
    options = {"words": words, "every": every}
    lanes = contest.compete(
        {
            "bare": (on_noop, options | {"contender": product.bare_loop}),
            "LMForge": (on_noop, options | {"contender": product.fit}),
            "bare again": (on_noop, options | {"contender": product.bare_loop}),
        },
        settings.pick(10, 2),
        settings.pick(2, 1),
        settings.folder / "overhead",
    )
    each = {name: lane.best / every for name, lane in lanes.items()}
    added = each["LMForge"] - each["bare"]
    return Row(
        "overhead a step, no-op network",
        f"<= {1e3 * MOST_SECONDS:.2f} ms; <= 1 % of a 70 ms step",
        f"{1e3 * added:.3f} ms, {added / STEP:.2%} of 70 ms (bare {1e3 * each['bare']:.3f} ms)\n"
        f"A/A {each['bare again'] / each['bare']:.3f}",
        verdict(added <= min(MOST_SECONDS, MOST_SHARE * STEP)),
        {"seconds": each},
    )


def _real(shards: Any, settings: Settings) -> Row:
    """The same on a network whose step takes about 70 ms. Caches the trainer has emptied count here."""
    size = {**training.SIZES["tiny"], "batch": settings.pick(20, 4)}
    every = settings.pick(10, 2)
    options = {"words": training.words(shards, size), "every": every}
    lanes = contest.compete(
        {
            "bare": (product.bare_loop, options),
            "LMForge": (product.fit, options),
            "bare again": (product.bare_loop, options),
        },
        settings.pick(15, 2),
        settings.pick(2, 1),
        settings.folder / "overhead-real",
    )
    ratio, again = (contest.Ratio.of(lanes[name].seconds, lanes["bare"].seconds) for name in ("LMForge", "bare again"))
    return Row(
        "overhead, real network",
        "<= 1 % of the step",
        f"{ratio.best - 1:+.1%} (rounds: {ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}) of "
        f"{1e3 * lanes['bare'].best / every:.0f} ms; A/A {again.best:.3f}",
        verdict(ratio.best - 1 <= MOST_SHARE, again.best),
        {"ratio": vars(ratio), "again": vars(again)},
    )
