"""Token shards: a folder of plain little-endian token files with a manifest that says exactly what they hold.

manifest.json            format, version, dtype, vocabulary, tokenizer, and per split the files with their sha256
tokenizer.json           the tokenizer the ids belong to, when known
train-00000.tokens       uint16 when every id fits (vocabulary <= 65536), else uint32; documents never straddle files
train.offsets.npy        int64 [documents + 1]: where each document starts among all tokens of the split
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmforge.config.aside import folder_aside
from lmforge.config.errors import UsageError
from lmforge.data.shard_checks import (
    MANIFEST,
    NAMES,
    TOKENIZER,
    check_dtype,
    check_tokenizer,
    inside,
    load_offsets,
    map_tokens,
    token_dtype,
)
from lmforge.data.tokenizer import Tokenizer

FORMAT, VERSION = "lmforge-tokens", 1  # the name stays: shards outlive a renamed package
MAX_SHARD_TOKENS = 1 << 28


class _SplitWriter:
    """Writes the documents of one split to files of at most `max_tokens` (a longer document has a file of its own)."""

    def __init__(self, folder: Path, split: str, vocab_size: int, max_tokens: int) -> None:
        self._folder, self._split, self._max = folder, split, max_tokens
        self._vocab, self._dtype = vocab_size, token_dtype(vocab_size)
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._shards: list[dict[str, Any]] = []
        self._offsets = array("q", [0])

    def add(self, document: np.ndarray) -> None:
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < self._vocab:
            raise ValueError(f"token ids {document.min()}..{document.max()} in a vocabulary of {self._vocab}")
        if self._file is None or self._shards[-1]["tokens"] + len(document) > self._max:
            self._next_file()
        data = np.ascontiguousarray(document, dtype=self._dtype).tobytes()
        assert self._file is not None
        self._file.write(data)
        self._digest.update(data)
        self._shards[-1]["tokens"] += len(document)
        self._offsets.append(self._offsets[-1] + len(document))

    def _next_file(self) -> None:
        self._end_file()
        name = f"{self._split}-{len(self._shards):05d}.tokens"
        self._file = (self._folder / name).open("xb")
        self._shards.append({"file": name, "tokens": 0})

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._shards[-1]["sha256"] = self._digest.hexdigest()
        self._file, self._digest = None, hashlib.sha256()

    def finish(self) -> dict[str, Any]:
        """Ends the split; what the manifest says about it."""
        self._end_file()
        offsets = np.array(self._offsets, dtype="<i8")
        np.save(self._folder / f"{self._split}.offsets.npy", offsets)
        return {"documents": len(offsets) - 1, "tokens": int(offsets[-1]), "shards": self._shards}


def write_shards(
    folder: Path,
    splits: Mapping[str, Iterable[np.ndarray]],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    extra: Mapping[str, Any] | None = None,
    split_extra: Mapping[str, Mapping[str, Any]] | None = None,
    names: Mapping[str, Iterable[str]] | None = None,
    beside: Mapping[str, Any] | None = None,
    max_shard_tokens: int = MAX_SHARD_TOKENS,
) -> Path:
    """Writes the documents (arrays of ids) of each split and returns `folder`.

    All is written into `<folder>.partial` first, synced and renamed: `folder` is whole or absent, and an older one is
    replaced. `extra` and `split_extra` go into the manifest as they are, for all and per split; `names` (of the
    documents) go into documents.json, and `beside` into JSON files of those names. One writer a folder at a time is the
    caller's duty.
    """
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "dtype": token_dtype(vocab_size).name}
    manifest |= {"vocab_size": vocab_size, "tokenizer": _describe(tokenizer), **(extra or {}), "splits": {}}
    with folder_aside(folder, folder.with_name(folder.name + ".partial")) as aside:
        for split, documents in splits.items():
            writer = _SplitWriter(aside, split, vocab_size, max_shard_tokens)
            for document in documents:
                writer.add(document)
            manifest["splits"][split] = writer.finish() | dict((split_extra or {}).get(split, {}))
        if tokenizer is not None:
            tokenizer.save(aside / TOKENIZER)
        if names is not None:
            _write_names(aside / NAMES, names)
        for name, content in (beside or {}).items():
            _write_json(aside / name, content)
        _write_json(aside / MANIFEST, manifest)
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _write_names(path: Path, names: Mapping[str, Iterable[str]]) -> None:
    """A JSON object of lists, one name a line, without holding them all."""
    with path.open("w", encoding="utf-8") as file:
        for i, (split, part) in enumerate(names.items()):
            file.write(f"{',' if i else '{'}\n {json.dumps(split)}: [")
            for j, name in enumerate(part):
                file.write(f"{',' if j else ''}\n  {json.dumps(name)}")
            file.write("\n ]")
        file.write("\n}" if names else "{}")


def _describe(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    names = {"sha256": tokenizer.fingerprint, "normalizer": tokenizer.normalizer}
    start = "eos" if tokenizer.bos is None else "bos"
    return names | {"bos": tokenizer.bos, "eos": tokenizer.eos, "end_of_text": f"{start} text eos"}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a shard folder; UsageError when it is missing, unreadable or of another format or version."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{folder}: no {MANIFEST}, so this is no folder of token shards") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else type(manifest).__name__
    if found != (FORMAT, VERSION):
        raise UsageError(f"{path}: expected format {(FORMAT, VERSION)}, found {found}")
    return manifest


class TokenShards:
    """The tokens of one split, memory-mapped. Pickles as its folder and split, so workers map the files themselves.

    `n_tokens`, `n_documents`, `size` (vocabulary), `offsets` (int64 [documents + 1]), `manifest`, `folder`, `split`.
    """

    def __init__(self, folder: Path, split: str, manifest: dict[str, Any]) -> None:
        """Use `TokenShards.open`."""
        self.folder, self.split, self.manifest = folder, split, manifest
        part = manifest["splits"][split]
        self.size: int = manifest["vocab_size"]
        self.n_tokens: int = part["tokens"]
        self.n_documents: int = part["documents"]
        dtype = token_dtype(self.size)
        self._files = [map_tokens(folder, shard, dtype) for shard in part["shards"]]
        self._starts = np.cumsum([0, *(len(tokens) for tokens in self._files)])
        if self._starts[-1] != self.n_tokens:
            raise UsageError(
                f"{folder / MANIFEST}: {self.n_tokens} {split} tokens expected, files hold {self._starts[-1]}"
            )
        self._dtype = dtype
        self.offsets = load_offsets(folder / f"{split}.offsets.npy", self.n_documents, self.n_tokens)

    @classmethod
    def open(cls, folder: str | Path, split: str) -> TokenShards:
        """Opens and checks one split: dtype, file sizes and offsets have to fit the manifest, else UsageError."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        try:
            splits = manifest["splits"]
            if split not in splits:
                raise UsageError(f"{folder}: no split '{split}'; there are {', '.join(splits)}")
            check_dtype(folder, manifest)
            check_tokenizer(folder, manifest)
            return cls(folder, split, manifest)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{folder / MANIFEST}: damaged, {type(error).__name__} {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards.open, (self.folder, self.split)

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, marks included; a view."""
        return self.tokens(int(self.offsets[number]), int(self.offsets[number + 1]))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop in the dtype on disk: a view where they lie in one file, else a copy."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.n_tokens}")
        first = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        pieces = []
        for tokens, begin in zip(self._files[first:], self._starts[first:], strict=False):
            if begin >= stop:
                break
            pieces.append(tokens[max(0, start - begin) : stop - begin])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self._dtype)

    def gather(self, index: np.ndarray) -> np.ndarray:
        """The tokens at the given positions, any shape, as int64."""
        index = np.asarray(index, dtype=np.int64)
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < self.n_tokens:
            raise IndexError(f"positions {index.min()}..{index.max()} of {self.n_tokens} tokens")
        if len(self._files) == 1:
            return self._files[0][index].astype(np.int64)
        found = np.empty(index.shape, dtype=np.int64)
        owner = np.searchsorted(self._starts, index, side="right") - 1
        for number in np.unique(owner):
            here = owner == number
            found[here] = self._files[number][index[here] - self._starts[number]]
        return found

    def rows(self, start: np.ndarray, width: int) -> np.ndarray:
        """`width` tokens from each start on, int64 [len(start), width]; past the split's end its last token again."""
        owner = np.searchsorted(self._starts, start, side="right") - 1
        inside = start + width <= self._starts[np.minimum(owner + 1, len(self._files))]
        if len(self._files) == 1 and inside.all():
            return self._cut(0, start, width).astype(np.int64)
        found = np.empty((len(start), width), dtype=np.int64)
        for number in np.unique(owner[inside]):
            here = inside & (owner == number)
            found[here] = self._cut(number, start[here] - self._starts[number], width)
        found[~inside] = self.gather(np.minimum(start[~inside, None] + np.arange(width), self.n_tokens - 1))
        return found

    def _cut(self, file: int, start: np.ndarray, width: int) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(np.asarray(self._files[file]), width)[start]

    def verify(self) -> None:
        """Reads every file and compares its sha256 with the manifest; UsageError names the first that differs."""
        for shard in self.manifest["splits"][self.split]["shards"]:
            path = inside(self.folder, shard["file"])
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard["sha256"]:
                raise UsageError(f"{path}: damaged, expected sha256 {shard['sha256']}, found {found}")
