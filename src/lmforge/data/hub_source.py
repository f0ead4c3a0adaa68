"""Documents out of data sets of the `datasets` library: a name on the Hub, or a local folder or file that it reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.optional import require
from lmforge.data.documents import Document, Report, Unfit, text_of
from lmforge.data.files import SourceFile
from lmforge.data.sources import Source

log = logging.getLogger(__name__)

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
HUB_SECONDS = 5.0  # how long the Hub has to answer once, before what is cached has to do
Node = Mapping[str, Any]


def hub_source(data: Node) -> Source:
    """The split of a data set that a `data=hub` node names. Local ones are known by the bytes of their files, those of
    the Hub by their commit."""
    return Source(
        "hub",
        lambda report: documents(open_rows(data), data, report),
        local_files(data["name"]),
        identity(data),
        lenient=data["on_bad"] == "lenient",
    )


def local_files(name: str) -> list[SourceFile]:
    """The files of a local data set, sorted by name; none for a name on the Hub."""
    path = Path(name)
    if path.is_file():
        return [SourceFile(path.name, path)]
    found = (p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))) if path.is_dir() else ()
    return sorted(SourceFile(p.relative_to(path).as_posix(), p) for p in found)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def identity(data: Node) -> str:
    """What beside the bytes of local files decides the documents, as text."""
    chosen = [data[key] for key in ("config", "split", "text_key", "on_bad")]
    if Path(data["name"]).exists():
        return json.dumps(chosen)
    builder = _loaded(data, lambda datasets, place: datasets.load_dataset_builder(**place))
    return json.dumps([data["name"], builder.config_id, builder.hash, *chosen])


def open_rows(data: Node) -> Any:
    """The split as an IterableDataset of `datasets`: rows come as they are asked for, and `state_dict()` gives a
    position as plain numbers. Raises UsageError for whatever cannot be opened."""
    rows = _loaded(data, lambda d, place: d.load_dataset(split=data["split"], streaming=True, **place))
    known = rows.column_names
    if known is not None and data["text_key"] not in known:
        raise UsageError(
            f"data.text_key={data['text_key']}: no such column in {data['name']}; it has {', '.join(known)}"
        )
    return rows if known is None else rows.select_columns([data["text_key"]])


def documents(rows: Iterable[Mapping[str, Any]], data: Node, report: Report) -> Iterator[Document]:
    """The texts of the rows, named by their number (of a local data set the same wherever it lies); empty ones are left
    out and counted, bad ones as `report` says."""
    key, name = data["text_key"], data["name"]
    short = Path(name).name if Path(name).exists() else name
    for number, row in enumerate(_readable(rows, data), start=1):
        try:
            text = text_of(row.get(key), key)
        except Unfit as error:
            report.bad(f"{name}:{number}", error)
            continue
        if text.strip():
            yield Document(f"{short}:{number}", text)
        else:
            report.skip("empty")


def _readable(rows: Iterable[Mapping[str, Any]], data: Node) -> Iterator[Mapping[str, Any]]:
    """The rows, with whatever the library raises on the way as UsageError."""
    number = 0
    try:
        for number, row in enumerate(rows, start=1):  # noqa: B007
            yield row
    except Exception as error:
        raise UsageError(f"data.name={data['name']}: not readable after row {number}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])[:300]


def _loaded(data: Node, load: Any) -> Any:
    datasets = _library()
    place = _place(data)
    if not Path(data["name"]).exists():
        _check_hub(data["name"], data["revision"])
    try:
        return load(datasets, place)
    except Exception as error:  # the library raises whatever its parts do
        words = " ".join(f"data.{key}={data[key]}" for key in ("config", "split", "revision") if data[key] is not None)
        here = "" if Path(data["name"]).exists() else "; nor is there such a file or folder here"
        raise UsageError(f"data.name={data['name']} {words}: {_first_line(error)}{here}") from error


def _place(data: Node) -> dict[str, Any]:
    """The arguments of load_dataset that say which data set; code of a data set is never run."""
    path = Path(data["name"])
    more = {"name": data["config"], "revision": data["revision"]}
    if not path.is_file():
        return {"path": data["name"], **more}
    format_ = path.suffix if path.suffix not in (".gz", ".zst", ".bz2", ".xz") else Path(path.stem).suffix
    if format_ not in BUILDERS:
        raise UsageError(f"data.name={path}: '{format_}' files are not read; read are {', '.join(BUILDERS)}")
    options = {"sep": "\t"} if format_ == ".tsv" else {}
    return {"path": BUILDERS[format_], "data_files": str(path), **more, **options}


def _library() -> Any:
    require("datasets", "data=hub")
    import datasets
    from tqdm import tqdm

    datasets.disable_progress_bars()
    tqdm.monitor_interval = 0  # else a bar that nobody sees starts a thread, which outlives it
    return datasets


def _check_hub(name: str, revision: str | None) -> None:
    """Asks the Hub once, since the library would repeat its question for half a minute. Where nobody answers, what was
    downloaded before is used."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UsageError(
            f"data.name={name}: no such file or folder here, and from the Hub: {_first_line(error)}"
        ) from error
    except Exception as error:  # no network, in the words of one of three libraries
        log.warning("the Hub does not answer (%s); only what was downloaded before is used", type(error).__name__)
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
