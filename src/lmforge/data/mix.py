"""`data=mix`: several sources in one run, each with its share of the tokens."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from lmforge.config.mixture import cycle_counts, switched_on
from lmforge.config.plain import hash_of
from lmforge.data.mix_sources import mixed_shards
from lmforge.data.mixture import MixedOrder, MixedRows
from lmforge.data.module import TokenWindows, load_tokenizer, train_rows
from lmforge.data.shards import read_manifest
from lmforge.data.windows import Window, Windows


class MixedData(TokenWindows):
    """Windows of rows out of several folders of token shards, `sources[name] = {path, weight}`.

    A row has `context` tokens whatever its source, so weights by tokens are weights by rows. `limit_train_rows` holds
    for each source alone.
    """

    def __init__(
        self,
        *,
        sources: Mapping[str, Any],
        vocab_size: int,
        tokenizer: str | None,
        cache: Path,
        **loading: Any,
    ):
        self.counts = cycle_counts({name: entry["weight"] for name, entry in switched_on(sources).items()})
        node = {"sources": sources, "vocab_size": vocab_size, "tokenizer": tokenizer}
        self.folders = mixed_shards(node, cache=Path(cache))
        super().__init__(Path("+".join(self.folders)), **loading)

    def _open(self) -> None:
        manifests = {name: read_manifest(folder) for name, folder in self.folders.items()}
        self.manifest = joined_manifest(manifests)
        self.tokenizer = load_tokenizer(next(iter(self.folders.values())))
        self.parts = [train_rows(folder, self.context, self.limit_train_rows) for folder in self.folders.values()]
        self.train = MixedRows(self.parts)

    def _facts(self) -> list[Any]:
        return [self.counts, self.manifest["train_shards"]]

    @cached_property
    def order(self) -> MixedOrder:
        return MixedOrder([len(part) for part in self.parts], list(self.counts.values()), self.seed)

    def _order(self) -> MixedOrder:
        return self.order

    def by_source(self, step: int) -> dict[str, float]:
        """`data/<source>/share` of the rows so far, and `data/<source>/epochs`: how often its text was read."""
        taken = dict(zip(self.counts, self.order.taken(self.samples_at(step)).tolist(), strict=True))
        total, sizes = max(1, sum(taken.values())), dict(zip(self.counts, map(len, self.parts), strict=True))
        shares = {f"data/{name}/share": rows / total for name, rows in taken.items()}
        return shares | {f"data/{name}/epochs": rows / sizes[name] for name, rows in taken.items()}

    def _scoring(self, split: str) -> tuple[Dataset[Window], Sequence[int]]:
        """A window's rows come from one source; the sources take turns, so that the first windows are of all."""
        named = [
            SourceWindows(name, *self.scored(self.rows(split, folder)))
            for name, folder in self.folders.items()
            if self.manifest["sources"][name].get(split, 0) > 1
        ]
        return ConcatDataset(named), in_turn([len(windows) for windows in named])


class SourceWindows(Windows):
    """Windows that say where their rows come from."""

    def __init__(self, source: str, *windows: Any):
        super().__init__(*windows)
        self.source = source

    def __getitem__(self, update: int) -> Window:
        return {**super().__getitem__(update), "source": self.source}


def in_turn(lengths: Sequence[int]) -> list[int]:
    """Numbers of all items of lists laid end to end: every list's first, every list's second, and so on."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    turns = [(at, start) for start, length in zip(starts, lengths, strict=True) for at in range(length)]
    return [start + at for at, start in sorted(turns)]


def joined_manifest(manifests: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the manifests of the sources say together: counts and bytes are sums, references are means over bytes."""
    first = next(iter(manifests.values()))
    splits = {split: None for manifest in manifests.values() for split in manifest["splits"]}
    parts = {split: [m["splits"][split] for m in manifests.values() if split in m["splits"]] for split in splits}
    return {
        "vocab_size": max(manifest["vocab_size"] for manifest in manifests.values()),
        "tokenizer": first["tokenizer"],
        "splits": {split: _joined_split(found) for split, found in parts.items()},
        "sources": {name: {s: part["tokens"] for s, part in m["splits"].items()} for name, m in manifests.items()},
        "train_shards": {name: _hashes(manifest["splits"].get("train")) for name, manifest in manifests.items()},
        "split_sha256": hash_of({name: manifest.get("split_sha256") for name, manifest in manifests.items()}),
        **{key: _mean_over_bytes(key, list(manifests.values())) for key in ("gzip_bits_per_byte", "xz_bits_per_byte")},
    }


def _joined_split(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The shards' hashes stay in the order of the sources, so that they still tell one data set from another."""
    joined: dict[str, Any] = {key: sum(part[key] for part in parts) for key in ("documents", "tokens")}
    if all("bytes" in part for part in parts):
        joined["bytes"] = sum(part["bytes"] for part in parts)
    return joined | {"shards": [shard for part in parts for shard in part["shards"]]}


def _hashes(part: dict[str, Any] | None) -> list[str]:
    return [shard["sha256"] for shard in part["shards"]] if part else []


def _mean_over_bytes(key: str, manifests: Sequence[dict[str, Any]]) -> float | None:
    """None unless every source with validation text knows the figure."""
    known = [
        (m.get(key), m["splits"]["val"].get("bytes")) for m in manifests if m["splits"].get("val", {}).get("tokens")
    ]
    if not known or any(value is None or not size for value, size in known):
        return None
    return sum(value * size for value, size in known) / sum(size for _, size in known)
