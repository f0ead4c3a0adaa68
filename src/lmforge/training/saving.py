"""Saving without stopping: a thread copies this rank's state into reused buffers, writes and publishes by renaming."""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from lmforge.config.aside import sync
from lmforge.config.errors import Exit, OutOfMemory, SaveFailed, UsageError, exit_code_of, is_out_of_memory
from lmforge.parallel.control import Control
from lmforge.parallel.parallel import Parallel
from lmforge.runs.folder import list_checkpoints
from lmforge.training.checkpoint import (
    FORMAT,
    KINDS,
    Checkpoint,
    Piece,
    local_piece,
    write_json,
    write_pieces,
    write_position,
)

OTHER_RANKS_SECONDS = 600.0  # how long rank 0 waits for the others' parts


def weight_pieces(network: nn.Module, parallel: Parallel | None = None) -> dict[str, Piece]:
    """This rank's pieces of every parameter and buffer; a tensor with two names (tied) is there once."""
    parallel = parallel or Parallel(network)
    return _pieces(((name, name, tensor) for name, tensor in parallel.weights()), parallel)


def optimizer_pieces(
    network: nn.Module, optimizers: list[Optimizer], parallel: Parallel | None = None
) -> dict[str, Piece]:
    """This rank's pieces of the optimizers' tensors, named `<parameter>/<slot>`."""
    parallel = parallel or Parallel(network)
    return _pieces(optimizer_tensors(parallel, optimizers), parallel)


def optimizer_tensors(parallel: Parallel, optimizers: list[Optimizer]) -> Iterator[tuple[str, str, Tensor]]:
    """`<parameter>/<slot>`, the parameter, and the tensor of everything that optimizers keep here."""
    for name, state in parallel.states(optimizers).items():
        for slot, value in state.items():
            yield f"{name}/{slot}", name, value


def _pieces(tensors: Iterable[tuple[str, str, Tensor]], parallel: Parallel) -> dict[str, Piece]:
    """Of (name, the parameter it belongs to, tensor). Gone through one by one: a tensor may be gathered to be seen."""
    pieces = {name: local_piece(tensor, parallel.writes) for name, whose, tensor in tensors if parallel.owns(whose)}
    return {name: piece for name, piece in pieces.items() if piece is not None}


def measurable(monitor: str, tokenizer_known: bool) -> str:
    """The metric that `monitor` can be here: without a tokenizer bytes are not known, and the loss stands in."""
    return "val/loss" if monitor == "val/bits_per_byte" and not tokenizer_known else monitor


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest `last` and the `best` by a metric; NaN and infinities are never best."""

    last: int
    best: int
    monitor: str
    mode: str

    def value(self, state: Mapping[str, Any]) -> float | None:
        """The metric as a number to minimise."""
        value = state.get("metrics", {}).get(self.monitor)
        if not isinstance(value, int | float) or not abs(value) < math.inf:  # a file may hold anything
            return None
        return value if self.mode == "min" else -value

    def best_of(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Checkpoints with a finite metric, best first; of equals the earlier."""
        scored = [(self.value(c.state), c.step, c) for c in checkpoints]
        return [c for _, _, c in sorted((v, s, c) for v, s, c in scored if v is not None)]

    def superfluous(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        newest = sorted(checkpoints, key=lambda c: c.step)[-max(self.last, 1) :]
        kept = {c.step for c in newest + self.best_of(checkpoints)[: self.best]}
        return [c for c in checkpoints if c.step not in kept]


def whole_checkpoints(folder: Path, report: Callable[[str], None] = lambda message: None) -> list[Checkpoint]:
    """Every complete checkpoint by rising step; broken ones are left out and named through `report`."""
    whole = []
    for path in list_checkpoints(folder):
        try:
            whole.append(Checkpoint(path))
        except UsageError as error:
            report(str(error))
    return whole


class Saver:
    """Writes checkpoints of one rank; rank 0 also publishes them and removes old ones.

    One save is in flight at most: a second one waits for the first. Ranks meet in the checkpoint folder itself, which
    must lie on storage they share, so that no collective runs beside the training's.
    """

    def __init__(self, folder: Path, rank: int, world: int, keep: Keep):
        self.folder, self.rank, self.world, self.keep = folder, rank, world, keep
        self.thread: threading.Thread | None = None
        self.copied = threading.Event()  # the state of the last save, which may change from now on
        self.copied.set()
        self.written = threading.Event()  # this rank's part of the last save, or its failure
        self.error: BaseException | None = None
        self.patience = OTHER_RANKS_SECONDS
        self.buffers: dict[str, Tensor] = {}
        self.blocked_seconds = 0.0

    def save(self, state: dict[str, Any], pieces: dict[str, dict[str, Piece]], position: Any = None) -> None:
        """Start to save `pieces` (by kind), `state` and this rank's `position` in its data, where that is not the step
        alone. Weights and optimizer state are copied meanwhile and must stay as they are until `let_change`; what
        belongs to the rank alone is copied here. Call on every rank."""
        began = time.perf_counter()
        self.wait()
        small = {**pieces, "local": self._copies("local", pieces["local"])}
        self.written.clear()
        self.copied.clear()
        self.thread = threading.Thread(target=self._run, args=(state, small, position), name="checkpoint-writer")
        self.thread.start()
        self.blocked_seconds += time.perf_counter() - began

    def let_change(self) -> None:
        """Until the copy is taken: an update has to wait for it, forward and backward passes have not."""
        began = time.perf_counter()
        self.copied.wait()
        self.blocked_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Until the last save is on disk; raises what stopped it."""
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def settle(self, control: Control) -> None:
        """`wait` for all ranks together: when one could not do its part no other waits for it, and all raise."""
        if self.thread is not None:
            self.written.wait()
        codes = control.gather(self.failed())
        if any(codes):
            self.patience = 0.0
        self.join()
        codes += control.gather(self.failed())
        if Exit.OUT_OF_MEMORY in codes and not is_out_of_memory(self.error):
            raise OutOfMemory("another rank had no memory to write its part of a checkpoint")
        if any(codes):
            raise self.error or SaveFailed("another rank could not write its part of a checkpoint")

    def failed(self) -> int:
        """The exit code that what went wrong here stands for, 0 when nothing did."""
        return 0 if self.error is None else int(exit_code_of(self.error))

    def _explained(self, name: str, error: BaseException) -> BaseException:
        """What the disk refused, with what is still there and how to go on; any other error as it is."""
        if not isinstance(error, OSError | SafetensorError) or is_out_of_memory(error):
            return error
        whole = whole_checkpoints(self.folder)
        stands = f"{whole[-1].folder.name} stands" if whole else "there is none before it"
        failed = SaveFailed(
            f"checkpoint {name} could not be written to {self.folder}: {error}; {stands}. When that is mended, go on "
            f"with: python train.py resume={self.folder.parent}"
        )
        failed.__cause__ = error
        return failed

    def clean(self, report: Callable[[str], None]) -> None:
        """Remove what interrupted saves left behind, and name them. Rank 0, before any rank saves."""
        for leftover in self.folder.glob(".step-*"):
            if leftover.suffix == ".part":
                report(f"{leftover}: a save that did not come to its end; removed")
            shutil.rmtree(leftover, ignore_errors=True)

    def _copies(self, kind: str, pieces: dict[str, Piece]) -> dict[str, Piece]:
        return {name: self._copy(f"{kind}/{name}", piece) for name, piece in pieces.items()}

    @torch.no_grad()
    def _copy(self, key: str, piece: Piece) -> Piece:
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != piece.values.shape or buffer.dtype != piece.values.dtype:
            pinned = piece.values.device.type == "cuda"
            buffer = torch.empty(piece.values.shape, dtype=piece.values.dtype, pin_memory=pinned)
            self.buffers[key] = buffer
        return replace(piece, values=buffer.copy_(piece.values))

    def _run(self, state: dict[str, Any], pieces: dict[str, dict[str, Piece]], position: Any) -> None:
        name = f"step-{state['step']:08d}"
        aside = self.folder / f".{name}.part"
        try:
            copies = {kind: self._copies(kind, pieces[kind]) for kind in KINDS if kind != "local"}
            self.copied.set()
            self._write(aside, {**pieces, **copies}, position)
            self.written.set()
            if self.rank == 0:
                self._publish(aside, self.folder / name, state)
                self._prune()
        except BaseException as error:
            self.error = self._explained(name, error)
            self.copied.set()
            self.written.set()
            if self.world == 1:  # else the others still write into it; the next start removes it
                shutil.rmtree(aside, ignore_errors=True)

    def _write(self, aside: Path, copies: dict[str, dict[str, Piece]], position: Any) -> None:
        aside.mkdir(parents=True, exist_ok=True)
        files = [write_pieces(aside, kind, self.rank, copies[kind]) for kind in KINDS if copies[kind]]
        if position is not None:
            files.append(write_position(aside, self.rank, position))
        write_json(aside / f"rank-{self.rank:05d}.json", files)

    def _publish(self, aside: Path, final: Path, state: dict[str, Any]) -> None:
        notes = [aside / f"rank-{rank:05d}.json" for rank in range(self.world)]
        began = time.monotonic()
        while missing := [note.name for note in notes if not note.exists()]:
            if time.monotonic() - began > self.patience:
                raise TimeoutError(f"{aside}: no {', '.join(missing)}; all ranks must write to the same storage")
            time.sleep(0.02)
        files = [entry for note in notes for entry in json.loads(note.read_text(encoding="utf-8"))]
        for note in notes:
            note.unlink()
        write_json(aside / "state.json", {"format": FORMAT, **state, "world_size": self.world, "files": files})
        sync(aside)
        if final.exists():  # a broken one of the same step that a resume has just done again
            final.rename(final.with_name(f".{final.name}.old"))
        aside.rename(final)
        sync(self.folder)
        shutil.rmtree(final.with_name(f".{final.name}.old"), ignore_errors=True)

    def _prune(self) -> None:
        for old in self.keep.superfluous(whole_checkpoints(self.folder)):
            hidden = old.folder.with_name(f".{old.folder.name}.old")
            old.folder.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
