"""The one checkpoint format: a folder of safetensors shards and a `state.json`, for every strategy and world size.

    checkpoints/step-00000100/
        weights-00000.safetensors     rank 0's pieces of the weights, under the network's own parameter names
        optimizer-00000.safetensors   `<parameter>/<slot>`
        local-00000.safetensors       what belongs to that rank alone (its metric sums)
        data-00000.json               how far that rank has read its documents, where they are streamed
        state.json                    step, counters, metrics, and bytes and sha256 of every file; written last

Every piece carries its place in the whole tensor in the file's header, so any number of ranks reads what any other
number wrote, and a file from one process is plain safetensors. There is no pickle. A folder is complete or invisible:
it is written under a hidden name, synced and renamed.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.config.aside import sync, write_aside
from lmforge.config.errors import UsageError
from lmforge.parallel.norm import local
from lmforge.parallel.places import holds_first, local_place

FORMAT = 1
KINDS = ("weights", "optimizer", "local")
# what may stand in state.json, which can come from a stranger
SHAPES: dict[str, type] = {
    **dict.fromkeys(("step", "samples", "tokens", "skipped", "failures", "total_steps", "world_size"), int),
    **dict.fromkeys(("metrics", "callbacks", "scaler"), dict),
    "data": str,
}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: its values, where it starts in the whole, and the whole's shape."""

    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def local_piece(tensor: Tensor, first: bool) -> Piece | None:
    """This rank's piece of a tensor, or None where another rank writes the same values. `first`: the rank that writes
    what is not cut."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape)) if first else None
    values = tensor.to_local().detach()
    if not values.numel() or not holds_first(tensor):
        return None
    return Piece(values, tuple(part.start for part in local_place(tensor)), tuple(tensor.shape))


def write_pieces(folder: Path, kind: str, rank: int, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Write one file of one rank, synced to disk; returns its entry for `state.json`."""
    path = folder / f"{kind}-{rank:05d}.safetensors"
    pieces = dict(sorted(pieces.items()))  # a resumed run holds them in another order
    places = {name: {"offset": piece.offset, "shape": piece.shape} for name, piece in pieces.items()}
    values = {name: piece.values.contiguous() for name, piece in pieces.items()}
    save_file(values, path, metadata={"format": "pt", "places": json.dumps(places)})
    order_header(path)
    sync(path)
    return _entry(path)


def write_position(folder: Path, rank: int, position: Any) -> dict[str, Any]:
    """Write where a rank is in its data, as plain JSON; returns the file's entry for `state.json`."""
    path = folder / f"data-{rank:05d}.json"
    write_json(path, position)
    return _entry(path)


def _entry(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest(path)}


def order_header(path: Path) -> None:
    """Sort a file's metadata in place: the library writes them in random order, but equal tensors are equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(ordered) <= size  # else it would run over the first tensor
        file.seek(8)
        file.write(ordered.ljust(size))


def write_json(path: Path, content: Any) -> None:
    write_aside(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Checkpoint:
    """A complete checkpoint on disk. Opening one checks that every file is there with its size.

    Raises UsageError 'incomplete or corrupt checkpoint' naming what is wrong.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            form, self.step = self.state["format"], int(self.state["step"])
            self.files = {str(f["file"]): {"bytes": f["bytes"], "sha256": f["sha256"]} for f in self.state["files"]}
            wrong = [key for key, kind in SHAPES.items() if not isinstance(self.state.get(key, kind()), kind)]
            if wrong:
                raise ValueError(f"{', '.join(wrong)} cannot be that")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.broken(f"state.json: {error}") from error
        if form != FORMAT:
            raise UsageError(f"{folder}: a checkpoint of format {form}; this version reads format {FORMAT}")
        for name, entry in self.files.items():
            self._check_size(name, entry)

    def broken(self, reason: str) -> UsageError:
        return UsageError(f"incomplete or corrupt checkpoint {self.folder}: {reason}")

    def _check_size(self, name: str, entry: Mapping[str, Any]) -> None:
        path = self.folder / name
        if Path(name).name != name or not path.is_file():
            raise self.broken(f"{name} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise self.broken(f"{name} has {path.stat().st_size} bytes, {entry['bytes']} were written")

    @property
    def hash(self) -> str:
        """Identity of the weights: equal for equal files, different when any weight differs."""
        hashes = "".join(entry["sha256"] for name, entry in sorted(self.files.items()) if name.startswith("weights-"))
        return hashlib.sha256(hashes.encode()).hexdigest()[:16]

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer behind the ids, as the manifest of the data described it; None when it was not known."""
        found = self.state.get("tokenizer")
        if not isinstance(found, dict | None):
            raise self.broken("state.json: tokenizer cannot be that")
        return found

    def position(self, rank: int) -> Any:
        """Where a rank was in its data; None when that is the step alone."""
        name = f"data-{rank:05d}.json"
        if name not in self.files:
            return None
        try:
            return json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise self.broken(f"{name}: {error}") from error

    def verify(self) -> None:
        """Read every file once and compare its hash."""
        for name, entry in self.files.items():
            if digest(self.folder / name) != entry["sha256"]:
                raise self.broken(f"the content of {name} is not what was written")

    def reader(self, kind: str) -> "PieceReader":
        names = sorted(name for name in self.files if name.startswith(f"{kind}-"))
        return PieceReader([self.folder / name for name in names])


class PieceReader:
    """Whole or partial tensors out of any set of shard files; reads only the bytes asked for."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.pieces: dict[str, list[tuple[Any, tuple[int, ...], tuple[int, ...]]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                self._index(safe_open(path, framework="pt"))
            except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"incomplete or corrupt weights file {path}: {error}") from error
        for name in self.shapes:
            self._check_places(name)

    def _index(self, file: Any) -> None:
        places = json.loads((file.metadata() or {}).get("places", "{}"))
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            piece = file.get_slice(name)
            size = tuple(piece.get_shape())
            place = places.get(name, {"offset": (0,) * len(size), "shape": size})
            self.pieces.setdefault(name, []).append((piece, tuple(map(int, place["offset"])), size))
            shape = tuple(map(int, place["shape"]))
            if self.shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name}: another shape than in the files before")
            if piece.get_dtype() not in DTYPES:
                raise ValueError(f"{name}: dtype {piece.get_dtype()}; known: {', '.join(DTYPES)}")

    def _check_places(self, name: str) -> None:
        """Pieces must lie inside the whole and apart from each other, else counting what is filled would prove nothing.

        Raises UsageError; the files may come from a stranger.
        """
        whole = self.shapes[name]
        places = sorted((offset, size) for _, offset, size in self.pieces[name])
        for number, (offset, size) in enumerate(places):
            inside = len(offset) == len(size) == len(whole)
            if not inside or any(a < 0 or a + n > m for a, n, m in zip(offset, size, whole, strict=True)):
                raise UsageError(f"{name}: a piece {list(size)} at {list(offset)} is not inside {list(whole)}")
            for other, more in places[number + 1 :]:
                if whole and other[0] >= offset[0] + size[0]:
                    break  # sorted by their first offset, so all that follow are further away
                if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, more, strict=True)):
                    raise UsageError(f"{name}: two pieces of it overlap")

    def check_whole(self, name: str) -> None:
        """Raise UsageError unless the files hold every value: to be asked before memory is taken for a shape that
        only the file vouches for."""
        held, size = sum(math.prod(size) for _, _, size in self.pieces[name]), math.prod(self.shapes[name])
        if held != size:
            raise UsageError(f"{name}: the files hold {held} of the {size} values asked for")

    def names(self) -> Iterator[str]:
        return iter(self.shapes)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.pieces[name][0][0].get_dtype()]

    def read_into(self, name: str, target: Tensor, offset: tuple[int, ...]) -> None:
        """Fill `target`, which lies at `offset` of the whole tensor, from every piece that overlaps it."""
        filled = 0
        for piece, start, size in self.pieces[name]:
            low = tuple(max(a, b) for a, b in zip(start, offset, strict=True))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, size, offset, target.shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            source = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            values = piece[source] if source else piece[...]
            target[place].copy_(values)
            filled += values.numel()
        if filled != target.numel():
            raise UsageError(f"{name}: the files hold {filled} of the {target.numel()} values asked for")

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU."""
        self.check_whole(name)
        whole = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.read_into(name, whole, (0,) * whole.dim())
        return whole

    @torch.no_grad()
    def load(self, name: str, tensor: Tensor) -> None:
        """Fill a parameter or state tensor, sharded or not, with what the files hold under `name`."""
        if tuple(tensor.shape) != self.shapes[name]:
            raise UsageError(f"{name}: shape {list(self.shapes[name])} in the file, {list(tensor.shape)} in the model")
        values = local(tensor.detach())
        if values.numel():
            self.read_into(name, values, tuple(part.start for part in local_place(tensor)))
