"""Small objects that many tests need: token rows, batch plans, networks with known weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmforge.config.batch import BatchPlan
from lmforge.config.layout import Layout
from lmforge.data.packing import PackedRows
from lmforge.data.shards import TokenShards, write_shards
from lmforge.models.gpt import GPT

SHAPE = {"vocab_size": 64, "context": 32, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32, "d_ff": 48}


def packed(folder: Path, documents: Sequence[Sequence[int]], context: int, **writing: Any) -> PackedRows:
    """Rows of the given documents (lists of ids below 1000)."""
    arrays = [np.array(document, dtype=np.int64) for document in documents]
    write_shards(folder, {"train": arrays}, vocab_size=1000, **writing)
    return PackedRows(TokenShards.open(folder, "train"), context)


def batch_plan(sequences: int, micro: int = 1, world: int = 1, context: int = 8) -> BatchPlan:
    accumulation = -(-sequences // (micro * world))
    return BatchPlan(sequences, micro, accumulation, Layout(dp=world), devices=world, nodes=1, context=context)


def tiny_gpt(seed: int = 1, scale: float = 1.0, **options: Any) -> GPT:
    """A network in evaluation mode as training might leave it: no zeros, no ones, every part at work.

    `scale` widens the matrices so that attention is far from uniform.
    """
    network = GPT(**{**SHAPE, **options}).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.normal_(0.0, 0.02 * scale if parameter.dim() > 1 else 0.1, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return network


def random_ids(rows: int, time: int, seed: int = 0, vocab: int = 64) -> torch.Tensor:
    return torch.randint(vocab, (rows, time), generator=torch.Generator().manual_seed(seed))
