"""How long a checkpoint keeps training waiting, against a plain torch.save of the same state."""

from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch

from benchmarks.contest import Ratio
from benchmarks.report import Row, verdict
from benchmarks.settings import Settings
from lmforge.models.gpt import GPT
from lmforge.parallel.plan import initialise
from lmforge.training.assemble import keep_memory
from lmforge.training.optimizers import adamw
from lmforge.training.saving import Keep, Saver, optimizer_pieces, weight_pieces

MOST = 0.05


def rows(settings: Settings) -> list[Row]:
    torch.set_num_threads(1)
    keep_memory()
    network = GPT(8192, 256, settings.pick(8, 2), 8, 8, settings.pick(512, 64), settings.pick(2048, 128))
    initialise(network, 0)
    optimizers = adamw(network, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    return [_blocked(network, optimizers, settings)]


def _blocked(network: GPT, optimizers: list[Any], settings: Settings) -> Row:
    folder = settings.folder / "checkpoints"
    folder.mkdir()
    saver = Saver(folder, 0, 1, Keep(1, 0, "val/loss", "min"))
    cpu: dict[str, list[float]] = {"torch.save": [], "LMForge": []}
    wall: dict[str, list[float]] = {"torch.save": [], "LMForge": []}

    ids = torch.randint(network.vocab_size, (settings.pick(4, 1), settings.pick(256, 64)))

    def ours(step: int) -> None:
        pieces = {"weights": weight_pieces(network), "optimizer": optimizer_pieces(network, optimizers), "local": {}}
        saver.save({"step": step}, pieces)

    def theirs(step: int) -> None:
        torch.save({"model": network.state_dict(), "optimizer": optimizers[0].state_dict()}, folder / "plain.pt")

    for step in range(settings.pick(6, 2)):
        for name, save in (("torch.save", theirs), ("LMForge", ours)):
            began, used = perf_counter(), thread_time()
            save(step)
            cpu[name].append(thread_time() - used)
            wall[name].append(perf_counter() - began)
            if name == "LMForge":  # the next step's forward and backward go on meanwhile, its update waits
                network(ids).float().logsumexp(-1).sum().backward()
                began, used = perf_counter(), thread_time()
                saver.let_change()
                cpu[name][-1] += thread_time() - used
                wall[name][-1] += perf_counter() - began
            saver.wait()
    clock = Ratio.of(wall["LMForge"][1:], wall["torch.save"][1:])
    used = min(cpu["LMForge"][1:]) / min(cpu["torch.save"][1:])
    size = _size(folder) / 1e6
    return Row(
        "checkpoint, time blocked",
        "<= 5 % of torch.save after the first",
        f"{clock.best:.1%} ({clock.low:.1%} to {clock.high:.1%}) of its wall time, {used:.1%} of its CPU time on the "
        f"training thread; first {wall['LMForge'][0] / wall['torch.save'][0]:.0%}; {size:.0f} MB",
        verdict(clock.middle <= MOST),
        {"cpu": cpu, "wall": wall, "ratio": vars(clock)},
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("step-*/*"))
