"""Opening an export without a run, a config or a trainer."""

from pathlib import Path

import torch
from torch import nn

from lmforge.data.tokenizer import Tokenizer
from lmforge.runs.exports import TOKENIZER
from lmforge.training.exported import Exported
from lmforge.training.weights import load_weights


def load(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, Tokenizer]:
    """The network in evaluation mode and its tokenizer; `dtype` None keeps the one the weights are stored in.

    Imports neither Hydra nor Lightning. Raises UsageError when the folder is not a whole export.
    """
    exported = Exported(Path(folder))
    network = exported.network().to(dtype or exported.dtype).to_empty(device=device)
    load_weights(network, exported.reader())
    return network.eval(), Tokenizer.load(exported.folder / TOKENIZER)
