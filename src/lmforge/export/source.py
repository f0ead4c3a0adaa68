"""What an exporter starts from: one checkpoint of a run, its tensors read one by one under the network's own names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lmforge.config.errors import UsageError
from lmforge.data.tokenizer import Tokenizer
from lmforge.runs.folder import RunFolder
from lmforge.runs.provenance import read_facts
from lmforge.training.assemble import make_network
from lmforge.training.checkpoint import Checkpoint
from lmforge.training.weights import match_names


@dataclass(frozen=True)
class Source:
    """A checkpoint whose weights fit `network` (on the meta device) name by name and shape by shape."""

    run: RunFolder
    checkpoint: Checkpoint
    model: dict[str, Any]  # the network's node of the config, rows of the embedding included
    network: nn.Module
    tokenizer: Tokenizer
    dtype: torch.dtype
    names: dict[str, str]  # the network's name of a tensor -> the checkpoint's

    @classmethod
    def open(cls, cfg: DictConfig, run: RunFolder, checkpoint: Checkpoint, tokenizer: Tokenizer) -> "Source":
        """Raises UsageError when the weights are not this model's, or in several dtypes with none chosen."""
        network = make_network(cfg, tokenizer.size)
        model = {**OmegaConf.to_container(cfg.model, resolve=True), "vocab_size": network.vocab_size}  # type: ignore[dict-item]
        names = match_names(network, checkpoint.reader("weights"))
        dtype = _stored_dtype(checkpoint, names) if cfg.dtype == "keep" else getattr(torch, cfg.dtype)
        return cls(run, checkpoint, model, network, tokenizer, dtype, names)

    @property
    def parameters(self) -> int:
        """Values in the file; a table that two layers share is one."""
        reader = self.checkpoint.reader("weights")
        return sum(torch.Size(reader.shapes[name]).numel() for name in self.names.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on the CPU in the asked dtype; raises UsageError naming one that does not fit into it."""
        reader = self.checkpoint.reader("weights")
        for name, stored in self.names.items():
            tensor = reader.read(stored)
            if tensor.is_floating_point():
                tensor = tensor.to(self.dtype)
                if not torch.isfinite(tensor).all():
                    raise UsageError(f"{name}: holds values that are not finite in {dtype_name(self.dtype)}")
            yield name, tensor

    def head(self) -> dict[str, Any]:
        """What every format's config says of the network, its tokenizer and where they came from."""
        facts = read_facts(self.run.path / "provenance.json")
        return {
            "model": self.model,
            "dtype": dtype_name(self.dtype),
            "parameters": self.parameters,
            "vocabulary": self.tokenizer.size,
            "special_ids": {"bos": self.tokenizer.bos, "eos": self.tokenizer.eos},
            "tokenizer": self.checkpoint.tokenizer or {},
            "origin": {
                "run": "/".join(self.run.path.resolve().parts[-3 if self.run.sweep else -2 :]),
                "step": self.checkpoint.step,
                "checkpoint": self.checkpoint.hash,
                "git_revision": str(facts.get("git_revision", "unknown")),
            },
        }


def _stored_dtype(checkpoint: Checkpoint, names: dict[str, str]) -> torch.dtype:
    reader = checkpoint.reader("weights")
    kinds = {reader.dtype(name) for name in names.values() if reader.dtype(name).is_floating_point}
    if len(kinds) != 1:
        listed = ", ".join(sorted(map(dtype_name, kinds))) or "no dtype"
        raise UsageError(f"dtype=keep: the weights are stored in {listed}; choose one with dtype=")
    return kinds.pop()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
