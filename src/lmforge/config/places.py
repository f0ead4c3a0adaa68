"""Where things lie, in a form that means the same from every working folder."""

from __future__ import annotations

import glob
import os

from lmforge.config.plain import Plain, get, put


def absolute_paths(plain: Plain) -> Plain:
    """Makes the config's own inputs and its cache absolute, in place. What is not there stays as typed, for the check
    that says so; run folders keep the short name they were given."""
    sources = [f"data.sources.{name}.{key}" for name in get(plain, "data.sources") or {} for key in ("path", "name")]
    for key in ("data.path", "data.name", "data.tokenizer", "weights", "paths.cache", *sources):
        path = get(plain, key)
        if isinstance(path, str) and path:
            put(plain, key, _absolute(path, must_exist=key != "paths.cache"))
    return plain


def _absolute(path: str, must_exist: bool) -> str:
    if os.path.exists(path) or not must_exist:
        return os.path.abspath(path)
    if glob.glob(path, recursive=True):
        return os.path.join(glob.escape(os.getcwd()), path)
    return path
