"""Peak memory of whole runs with a large vocabulary: recomputed blocks and a loss in chunks, against neither."""

import sys

from benchmarks import corpus, processes, product
from benchmarks.report import Row, verdict
from benchmarks.settings import Settings

MOST_MEMORY, MOST_TIME = 0.6, 1.35
SAVING = ("trainer.activation_checkpointing=1", "trainer.loss_chunk=256")


def rows(settings: Settings) -> list[Row]:
    shards = corpus.byte_shards(settings.folder / "bytes", settings.pick(4.0, 0.3))
    vocabulary, context, width = settings.pick((50304, 512, 384), (1024, 64, 64))
    words = f"""
    data=tokens data.path={shards} model.vocab_size={vocabulary} model.context={context} model.d_model={width}
    model.d_ff={4 * width} model.n_layer=6 model.n_head=6 model.n_kv_head=6 model.head_dim=64 model.tied=true
    optimizer=adamw batch.tokens=null batch.sequences=8 batch.micro_sequences=8 trainer.limit_val_batches=1
    callbacks.checkpoint=null callbacks.samples=null trainer.threads=1
    """.split()

    def train(folder: str, steps: int, *more: str) -> processes.Usage:
        command = [sys.executable, str(product.ROOT / "train.py"), *words, f"trainer.max_steps={steps}", *more]
        return processes.run(command, settings.folder / folder) if steps else processes.Usage(0.0, 0)

    few, many = settings.pick((1, 5), (0, 3))
    used = {
        name: [train(name, n, *more) for n in (few, many)] for name, more in {"plain": (), "saving": SAVING}.items()
    }
    seconds = {name: (b.seconds - a.seconds) / (many - few) for name, (a, b) in used.items()}
    memory = used["saving"][1].peak / used["plain"][1].peak
    time = seconds["saving"] / seconds["plain"]
    return [
        Row(
            f"peak memory, vocabulary {vocabulary}, blocks recomputed and loss in chunks",
            f"<= {MOST_MEMORY}x for <= {MOST_TIME}x time",
            f"{memory:.2f}x ({used['saving'][1].peak / 1e6:.0f} of {used['plain'][1].peak / 1e6:.0f} MB, processes) "
            f"for {time:.2f}x CPU time a step ({seconds['plain']:.1f} s)",
            verdict(memory <= MOST_MEMORY and time <= MOST_TIME),
            {"memory": memory, "time": time, "seconds": seconds},
        )
    ]
