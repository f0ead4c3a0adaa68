"""Filling a network from what files hold: every tensor by its plain name, none missing, none left over."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from lmforge.config.errors import UsageError
from lmforge.training.checkpoint import PieceReader

if TYPE_CHECKING:  # an export is opened without Lightning
    from lmforge.parallel.parallel import Parallel

WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without what compilers and wrappers put before or between its parts."""
    for wrapper in WRAPPERS:
        while name.startswith(wrapper) or f".{wrapper}" in name:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def match_names(network: nn.Module, reader: PieceReader, others: Iterable[str] = ()) -> dict[str, str]:
    """The name in the files of every parameter and buffer of `network`; a tensor with two names (tied) is one. Files
    must hold `others` as well, which belong to the network but are on other ranks, so that all ranks miss the same.

    Raises UsageError listing the keys that are missing, left over or of another shape.
    """
    wanted = dict(network.named_parameters()) | dict(network.named_buffers())
    found = {plain_name(name): name for name in reader.names()}
    whole = set(wanted) | set(others)
    missing, unexpected = sorted(whole - set(found)), sorted(set(found) - whole)
    shapes = [
        f"{name}: {list(reader.shapes[found[name]])} in the file, {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in found and tuple(tensor.shape) != reader.shapes[found[name]]
    ]
    if missing or unexpected or shapes:
        where = reader.paths[0].parent if reader.paths else "(no file)"
        raise UsageError(
            f"the weights in {where} are not this model's: missing {some(missing)}, unexpected {some(unexpected)}, "
            f"shapes that differ {some(shapes)}"
        )
    return {name: found[name] for name in wanted}


def load_weights(network: nn.Module, reader: PieceReader, parallel: "Parallel | None" = None) -> None:
    """Fill every parameter and buffer of `network`, spread as `parallel` says or whole in this process; raises
    UsageError before anything is changed."""
    whole, others = (parallel.whole, parallel.names) if parallel else (network, ())
    names = match_names(whole, reader, others)
    for name, tensor in (dict(whole.named_parameters()) | dict(whole.named_buffers())).items():
        load = partial(reader.load, names[name])
        if parallel:
            parallel.fill(name, tensor, load)
        else:
            load(tensor)


def some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
