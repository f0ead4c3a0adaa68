"""Step time and memory of every precision against 32-true."""

import torch

from benchmarks import contest, corpus, product
from benchmarks.report import PASS, SHOWN, WARN, Row, not_run
from benchmarks.rows import training
from benchmarks.settings import Settings

CLAIM = "usual claim: 2-3x, 40-60 %"
WORDS = ("32-true", "bf16-mixed", "bf16-true", "64-true")


def rows(settings: Settings) -> list[Row]:
    size = training.SIZES[settings.pick("small", "tiny")]
    shards = corpus.byte_shards(settings.folder / "bytes", settings.pick(4.0, 0.3))
    words = training.words(shards, size)
    options = {word: {"words": [*words, f"precision={word}"]} for word in settings.pick(WORDS, WORDS[:3])}
    contenders = {word: (product.fit, option) for word, option in options.items()}
    lanes = contest.compete(contenders, settings.pick(5, 2), settings.pick(1, 1), settings.folder / "precision")
    gpu = "no GPU" if not torch.cuda.is_available() else "this row measures the CPU alone"
    return [*(_row(word, lanes) for word in lanes), not_run("precision on a GPU", CLAIM, gpu)]


def _row(word: str, lanes: dict[str, contest.Lane]) -> Row:
    base, lane = lanes["32-true"], lanes[word]
    speed, memory = contest.Ratio.of(base.seconds, lane.seconds), lane.peak / base.peak
    kept = word in ("64-true", "32-true")  # nobody claims speed for these on a CPU
    found = SHOWN if kept else PASS if speed.best >= 2.0 and memory <= 0.6 else WARN
    return Row(
        f"precision {word}, CPU",
        "" if kept else CLAIM,
        f"{speed}x as fast as 32-true, {memory:.0%} of its peak memory ({lane.peak / 1e6:.0f} MB, process)",
        found,
        {"speed": vars(speed), "memory": memory, "cpu_ms": 1e3 * lane.best},
    )
