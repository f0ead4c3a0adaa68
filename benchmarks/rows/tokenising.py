"""Text to tokens: megabytes a CPU-second against the `tokenizers` package, and two processes against one."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from benchmarks import corpus, processes
from benchmarks.contest import Ratio
from benchmarks.machine import busy
from benchmarks.report import NOISY, Row, not_run, verdict
from benchmarks.settings import Settings
from lmforge.data.tokenizer import Tokenizer

LEAST, LEAST_TWO = 4.0, 1.8


def rows(settings: Settings) -> list[Row]:
    texts = [text.decode("utf-8", errors="replace") for text in corpus.texts(settings.pick(4.0, 0.3))]
    tokenizer = Tokenizer.train(texts[: settings.pick(60, 4)], settings.pick(8192, 512))
    return [_one_core(tokenizer, texts, settings), _two_processes(tokenizer, settings)]


def _one_core(tokenizer: Tokenizer, texts: list[str], settings: Settings) -> Row:
    """Both are asked for the same arrays of ids, tokenizers by its faster call."""
    import tokenizers

    peer = tokenizers.Tokenizer.from_str(tokenizer._content)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    times: dict[str, list[float]] = {"tokenizers": [], "LMForge": []}
    for _ in range(settings.pick(5, 1)):
        began = process_time()
        found = peer.encode_batch_fast(texts, add_special_tokens=False)
        theirs = [np.array(encoding.ids, dtype=np.uint32) for encoding in found]
        times["tokenizers"].append(process_time() - began)
        began = process_time()
        ours = list(tokenizer.encode_many(texts))
        times["LMForge"].append(process_time() - began)
    ratio = Ratio.of(times["tokenizers"], times["LMForge"])
    speeds = {name: megabytes / min(spent) for name, spent in times.items()}
    equal = all(map(np.array_equal, ours, theirs))
    same = "the same ids" if equal else "OTHER IDS"
    return Row(
        "tokenising, one core",
        f">= {LEAST:.0f}x tokenizers",
        f"{ratio}x; {speeds['LMForge']:.1f} against {speeds['tokenizers']:.1f} MB per CPU-s, {same}",
        verdict(ratio.best >= LEAST and equal),
        {"ratio": vars(ratio), "megabytes_per_cpu_second": speeds},
    )


def _two_processes(tokenizer: Tokenizer, settings: Settings) -> Row:
    """`lmforge prepare` with two workers against one, by the clock: the only way to see two cores at work."""
    what, goal = "tokenising, two processes", f">= {LEAST_TWO}x one process (wall time)"
    if find_spec("lmforge.data.command") is None:
        return not_run(what, goal, "no `lmforge prepare` here")
    folder = settings.folder / "prepare"
    source = _source(folder / "corpus", settings.pick(24.0, 0.3))
    tokenizer.save(folder / "tokenizer.json")
    times: dict[int, list[float]] = {1: [], 2: []}
    used: dict[int, float] = {}
    for _ in range(settings.pick(3, 1)):
        for workers in times:
            cache = folder / f"cache-{workers}"
            shutil.rmtree(cache, ignore_errors=True)
            words = [f"data.path={source}", f"data.tokenizer={folder / 'tokenizer.json'}", f"workers={workers}"]
            command = [sys.executable, "-m", "lmforge.cli", "prepare", "data=text", *words, f"paths.cache={cache}"]
            began = perf_counter()
            used[workers] = processes.run(command, folder).seconds
            times[workers].append(perf_counter() - began)
    ratio = min(times[1]) / min(times[2])
    seconds = f"{min(times[1]):.1f} s against {min(times[2]):.1f} s, CPU {used[1]:.1f} against {used[2]:.1f} s"
    found = f"{NOISY} (cores are busy)" if ratio < LEAST_TWO and busy() else verdict(ratio >= LEAST_TWO)
    return Row(what, goal, f"{ratio:.2f}x; {seconds}", found, {"ratio": ratio, "wall": times, "cpu": used})


def _source(folder: Path, megabytes: float) -> Path:
    """Sources of the installed packages as files of their own, since copies of one text would be dropped."""
    folder.mkdir(parents=True)
    size = 0
    for number, path in enumerate(sorted(Path(str(find_spec("torch").submodule_search_locations[0])).rglob("*.py"))):  # type: ignore[union-attr, index]
        shutil.copy(path, folder / f"{number:05d}.txt")
        size += path.stat().st_size
        if size > 1e6 * megabytes:
            break
    return folder
