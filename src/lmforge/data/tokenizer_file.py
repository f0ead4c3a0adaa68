"""What a tokenizer.json says about itself: is it byte-level BPE, how it splits text, what its tokens stand for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from lmforge.config.errors import UsageError

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _byte_table() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table), inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, printable + others, strict=True))


BYTE_OF = _byte_table()


def _pre_tokenizers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    step = spec.get("pre_tokenizer") or {"type": "none"}
    return step["pretokenizers"] if step["type"] == "Sequence" else [step]


def require_byte_level(spec: dict[str, Any], origin: str) -> None:
    """Raises UsageError, naming `origin`, for a tokenizer of another kind."""
    kind = spec["model"].get("type", "BPE")
    steps = [step["type"] for step in _pre_tokenizers(spec)]
    if kind != "BPE" or "ByteLevel" not in steps:
        raise UsageError(
            f"{origin}: a byte-level BPE file is needed (model BPE, pre-tokenizer ByteLevel); "
            f"found model {kind}, pre-tokenizer {' + '.join(steps)}"
        )


def split_pattern(spec: dict[str, Any]) -> str | None:
    """The one regex the file splits text with before BPE, or None when it does something else."""
    steps = _pre_tokenizers(spec)
    last = steps[-1]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2_PATTERN if last.get("use_regex", True) else None
    first = steps[0]
    plain = len(steps) == 2 and not last.get("use_regex", True) and first["type"] == "Split"
    if not plain or first["behavior"] != "Isolated" or first.get("invert"):
        return None
    return first["pattern"].get("Regex")


def ids_are_merge_ranks(spec: dict[str, Any]) -> bool:
    """Whether repeatedly merging the pair with the lowest id is all that the file's model does to a piece."""
    model = spec["model"]
    unlike = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token", "byte_fallback")
    if any(model.get(key) for key in unlike):
        return False
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    ids = [model["vocab"].get(left + right, -1) for left, right in merges]
    return all(a < b for a, b in pairwise(ids))


def describe_normalizer(step: dict[str, Any] | None) -> str | None:
    """The normaliser's type (`NFC`), types joined by `+` for several, None for none."""
    if not step:
        return None
    return "+".join(s["type"] for s in step["normalizers"]) if step["type"] == "Sequence" else step["type"]


def token_bytes(token: str) -> bytes:
    """The bytes a vocabulary entry stands for."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an entry that is not in the byte alphabet stands for its own text
        return token.encode("utf-8")
