"""An exported folder opened for reading: the same view of weights that a checkpoint gives."""

import inspect
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmforge.config.errors import UsageError
from lmforge.config.targets import load_target
from lmforge.runs.exports import CONFIG, TOKENIZER, WEIGHTS, read_export
from lmforge.training.checkpoint import PieceReader, digest


class Exported:
    """Raises UsageError unless the folder is whole: known config, both files with their sha256, dtypes as declared."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_export(folder)
        self.step = int(self.config["origin"]["step"])
        for name in (WEIGHTS, TOKENIZER):
            if digest(folder / name) != self.config["files"][name].get("sha256"):
                raise self.broken(f"the content of {name} is not what was written")
        self._check_header(self.reader())

    def broken(self, reason: str) -> UsageError:
        return UsageError(f"incomplete or corrupt export {self.folder}: {reason}")

    def _check_header(self, reader: PieceReader) -> None:
        kinds = {name: reader.dtype(name) for name in reader.names()}
        others = [f"{name} is {kind}" for name, kind in kinds.items() if kind.is_floating_point and kind != self.dtype]
        if others:
            raise self.broken(f"{CONFIG} says {self.config['dtype']}, but {others[0]}")
        held = sum(math.prod(shape) for shape in reader.shapes.values())
        if held != self.config["parameters"]:
            raise self.broken(f"{CONFIG} says {self.config['parameters']} parameters, {WEIGHTS} holds {held}")

    @property
    def hash(self) -> str:
        """Identity of the weights, equal for equal files."""
        return str(self.config["files"][WEIGHTS]["sha256"])[:16]

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer behind the ids, described as a checkpoint describes it."""
        return self.config["tokenizer"] or None

    @property
    def dtype(self) -> torch.dtype:
        kind = getattr(torch, self.config["dtype"])
        assert isinstance(kind, torch.dtype)
        return kind

    def reader(self, kind: str = "weights") -> PieceReader:
        """The weights; there is no other kind of tensors in an export."""
        return PieceReader([self.folder / WEIGHTS] if kind == "weights" else [])

    def network(self) -> nn.Module:
        """The network on the meta device: shapes and names, no memory."""
        arguments = {key: value for key, value in self.config["model"].items() if key != "_target_"}
        target = load_target(self.config["model"]["_target_"])
        try:
            inspect.signature(target).bind(**arguments)
        except TypeError as error:
            raise self.broken(f"{CONFIG}: model: {error}") from error
        with torch.device("meta"):
            network = target(**arguments)
        assert isinstance(network, nn.Module)
        return network
